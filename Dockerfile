# Two images of the launcher: `cpu` trains on any machine, `cuda` on one with NVIDIA's driver and container toolkit.
#   docker build --target cpu -t grpo-launcher:cpu .
# Both contain the same packages: SGLang depends on PyTorch's CUDA build, about 9.5 GB.
FROM python:3.11-slim-bookworm AS packages
# With an epoch set, Python and pip write bytecode that is checked by what a file contains, not by its date: buildah
# rounds dates as it copies, and the user below, who may not write there, would compile half of it in each process.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=315532800
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /build
# What is slow to install depends on two files only: a change of the code builds the second layer anew.
COPY constraints.txt pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-deps .

FROM python:3.11-slim-bookworm AS cpu
# SGLang loads libnuma where it binds to a NUMA node; tini, as process 1, forwards signals and reaps orphans; g++ is for
# what compiles at run time (torch.compile, Triton). Debian keeps only the newest version of each package.
# `install` gives a folder that it makes on the way to root, so `.cache` is named too. The base has no bytecode of
# Python's own modules.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 grpo \
    && install -d -o grpo -g grpo /work/outputs /home/grpo/.cache /home/grpo/.cache/huggingface \
    && python -m compileall -q --invalidation-mode checked-hash /usr/local/lib/python3.*
COPY --from=packages /opt/venv /opt/venv
# A user id that has no name here (`docker run --user 1234`) takes this one: torch and SGLang's caches ask for a name.
ENV PATH=/opt/venv/bin:$PATH USER=grpo
WORKDIR /work
USER 10001
# SIGTERM finishes the current step, saves, and exits; give it time (`docker stop -t 120`). A reward function that is
# mounted at /work is found.
ENTRYPOINT ["tini", "--", "python", "-m", "launcher"]
CMD ["conf=arithmetic_cpu"]
# The launcher watches and repairs its own processes, and ends with an exit code when it can't. A container restarted
# from outside in the middle of a repair would undo it.
HEALTHCHECK NONE

FROM cpu AS cuda
# The driver's libraries and tools are mounted by NVIDIA's container toolkit; CUDA's come with the Python packages.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["conf=gsm8k_h200"]
