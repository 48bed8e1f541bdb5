"""How a command follows its run: the screen, Ctrl-C, a detached run and attaching to it; and the doctor. With the
driver, the only room of the launcher that may import Ray and `actors`. Begin with `run_screen`, or with `detached`.
"""
