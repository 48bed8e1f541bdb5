"""The names of SGLang's arguments that are not the user's to give in `sglang.extra_args`. No SGLang is imported here.

SGLang takes an argument under several names, and under any beginning that is no other argument's: given twice, the
last one wins, and the plan of the run would be that of another server.
"""

from __future__ import annotations

from collections.abc import Mapping

ARGUMENTS_OF_OURS = frozenset(
    {
        *("model_path", "dtype", "device", "tp_size", "dp_size", "context_length", "mem_fraction_static"),
        *("max_total_tokens", "max_running_requests", "random_seed", "attention_backend", "host", "port", "log_level"),
        *("cuda_graph_max_bs_decode", "weight_version", "enable_metrics", "nnodes", "node_rank", "dist_init_addr"),
    }
)
"""Those that a named setting or the launcher itself gives: in `extra_args` one of the two would be lost."""
GPU_ARGUMENTS = frozenset({"pp_size", "base_gpu_id", "gpu_id_step"})
"""With them a server takes other GPUs than the plan counts, and Ray reserves: its first tp_size × dp_size. One that Ray
has not given it is an invalid device, which a server reports only when it starts."""
SECRET_ARGUMENTS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
BYPASSES: Mapping[str, tuple[object, str]] = {
    "api_key": (None, "it would stand in the process list and in the log"),
    "admin_api_key": (None, "it would stand in the process list and in the log"),
    "tokenizer_worker_num": (1, "further HTTP processes would serve without keys"),
    "encoder_only": (False, "that server would serve without keys"),
    "smg_grpc_mode": (False, "gRPC knows no keys"),
    "grpc_mode": (False, "gRPC knows no keys"),
    "grpc_port": (None, "gRPC knows no keys"),
    "use_ray": (False, "that server would serve without keys"),
    "enable_http2": (False, "that server has not been tried with keys"),
    "enable_dp_attention": (False, "its processes unpickle what anybody sends to a TCP port"),
    "enable_custom_logit_processor": (False, "it unpickles code from requests"),
    "trust_remote_code": (False, "it runs code from the model's folder"),
    "disaggregation_mode": ("null", "its bootstrap server knows no keys"),
}
"""Those that would bypass the check of keys (actors/serving/auth_middleware.py) or run a stranger's code, the value
that each must have, and why. A server ends with one of another value, so a plan with it would never run."""
OTHER_NAMES = {
    "model": "model_path",
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "pipeline_parallel_size": "pp_size",
    "nccl_init_addr": "dist_init_addr",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
}
"""Further names of the arguments above; tests/unit/launcher/resources/test_sglang_arguments.py asks SGLang for them."""
NOT_CUT = frozenset({"ssl_keyfile"})
"""Whole names of arguments of the user's with which a name of the above begins."""
MAY_BE_CUT = "host"
"""A server may listen behind a proxy of the user's, at another address than it is asked at: `hos` is checked as one."""


def plain_name(given: str) -> str:
    """As SGLang's attribute is called: of `--tp-size`, and of `tp-size=2`, which a flag's name may hold."""
    return given.partition("=")[0].replace("-", "_").strip("_")


def meant(given: str) -> str:
    """The argument of one of the four tables that SGLang would take `given` for; "" where it is the user's own."""
    plain, listed = plain_name(given), ARGUMENTS_OF_OURS | GPU_ARGUMENTS | SECRET_ARGUMENTS | BYPASSES.keys()
    if plain in listed:
        return plain
    if plain in OTHER_NAMES:
        return OTHER_NAMES[plain]
    if plain in NOT_CUT:
        return ""
    names = {name: name for name in listed if name != MAY_BE_CUT} | OTHER_NAMES
    return min((ours for name, ours in names.items() if plain and name.startswith(plain)), default="")
