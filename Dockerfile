# The scheduler, and an image to build trials' images on: FROM elastune, then pip install what they import.
#   docker build -t elastune:0.1.0 .
# The build argument PIP_OPTIONS takes options of pip, such as for PyTorch's index of builds without CUDA.
ARG PYTHON=3.12
FROM node:22-slim AS page
WORKDIR /page
COPY scheduler/dashboard/page .
RUN npm ci --no-audit --no-fund && npm run build

FROM python:${PYTHON}-slim AS build
ARG TORCH_VERSION=2.13.0
ARG PIP_OPTIONS=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/elastune
ENV PATH=/opt/elastune/bin:$PATH
# The largest layer, which changes least, comes first.
RUN pip install ${PIP_OPTIONS} "torch==${TORCH_VERSION}"
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY dist_core dist_core
COPY trials trials
COPY scheduler scheduler
COPY tuner_bridge tuner_bridge
COPY --from=page /page/built scheduler/dashboard/page/built
RUN pip install ".[optuna,kubernetes]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/elastune /opt/elastune
ENV PATH=/opt/elastune/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
RUN useradd --uid 1000 --create-home elastune && mkdir -p /var/lib/elastune && chown 1000:1000 /var/lib/elastune
USER 1000:1000
WORKDIR /home/elastune
CMD ["elastune", "--help"]
