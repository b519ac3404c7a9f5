"""What a checkpoint says about being quantised: weights that are cannot be read, a scheme for the
KV cache alone is no matter of the weights.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from worker.model.errors import ModelLoadError

Scheme = dict[str, Any]

SERVED: Final = "serve the unquantised checkpoint or a GGUF file"


def without_kv_scheme(config: Any) -> Any:
    """The transformers configuration without its quantisation, where that is one of the KV cache
    alone; else the configuration itself.

    Raises:
        ModelLoadError: weights are quantised, or the KV cache is to something else than fp8.
    """
    given: Scheme | None = config.to_dict().get("quantization_config")
    if not given:
        return config
    method = given.get("quant_method")
    if method not in _KV_TYPES or _quantises_weights(given):
        raise ModelLoadError(
            f"weights quantised by {method} are not read; expected float32, bfloat16 or float16: "
            f"{SERVED}"
        )
    held = _KV_TYPES[method](given)
    if held != "fp8":
        raise ModelLoadError(f"a KV cache scheme of {held}: expected fp8; {SERVED}")
    own = copy.deepcopy(config)
    del own.quantization_config
    return own


def _quantises_weights(given: Scheme) -> bool:
    groups = (given.get("config_groups") or {}).values()
    return bool(given.get("quant_algo")) or any(group.get("weights") for group in groups)


def _compressed_tensors(given: Scheme) -> str:
    scheme = given.get("kv_cache_scheme") or {}
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    return "fp8" if (kind, bits) == ("float", 8) else f"{kind} in {bits} bits"


def _modelopt(given: Scheme) -> str:
    if given.get("kv_cache_scheme"):
        return _compressed_tensors(given)
    return str(given.get("kv_cache_quant_algo")).lower()


_KV_TYPES: Final = {"compressed-tensors": _compressed_tensors, "modelopt": _modelopt}
"""By method, what its scheme has the KV cache in."""
