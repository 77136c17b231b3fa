# An image for `trainer launch kubernetes` and `trainer launch slurm --container`:
#   docker build -t trainer .
# torch's wheels bring CUDA; the base image has the C compiler that Triton needs.
FROM python:3.12

ENV SOURCE=/trainer/source VENV=/trainer/venv PIP_NO_CACHE_DIR=1
COPY . $SOURCE

RUN python3 -m venv "$VENV"
RUN "$VENV/bin/pip" install -c "$SOURCE/constraints.txt" torch
RUN "$VENV/bin/pip" install -c "$SOURCE/constraints.txt" "$SOURCE[hf,data]"
RUN "$VENV/bin/trainer" --version

ENV PATH=$VENV/bin:$PATH
WORKDIR /workspace
