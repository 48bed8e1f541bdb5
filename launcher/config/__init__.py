"""The settings: declared in `schema` and `supervision`, composed from presets and overrides by `compose`, checked by
`validation`. Hydra, OmegaConf and pydantic are imported here and in `launcher.__main__` only; every other room gets a
plain `RunConfig`. May import `launcher.base`. Begin with `schema`.
"""
