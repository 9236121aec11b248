"""An operator's name -> None, or why a model file must not call it.

A model file is a graph of operator names that run with the worker's rights. The rule for ``aten``: an operator that
this torch knows, that is public or on the short list of private ones that networks use, that takes only tensors and
plain values, and that is not in the table of refusals below. Other namespaces are listed name by name.

Not a sandbox: an operator may still ask for too much memory or time, or meet a bug of its kernel.
"""

from __future__ import annotations

import functools
import re

import torch

#: Argument types that are more than data: memory, streams, other processes, C++ objects, the random state.
_NOT_DATA = re.compile(r"\b(Storage|Stream|Future|RRef|torch\.classes)\b|^Generator$")

#: What an inference graph has no use for, by the name without its trailing underscore.
_REFUSED = {
    "opens files": r"from_file|save",
    "changes global state": r"manual_seed|seed|initial_seed|Generator|set_grad_enabled|set_data|retain_grad|pin_memory",
    "belongs to training": r"(.*_)?backward(_.*)?",
    # Kernels that trust their arguments: packed weights are pointers, sparse and quantized parts go unchecked.
    "works on unchecked memory": r"set|resize.*|shallow_copy_data|segment_reduce|fbgemm_.*|mkldnn_.*|to_mkldnn.*"
    r"|cudnn_.*|miopen_.*|mps_.*|lstm_mps.*|quantized_.*|choose_qparams.*|(to_|copy_)?sparse(_.*)?|coalesce|nested_.*",
}

#: Private aten operators that exports and TorchScript of ordinary networks contain. Dunder names are Python's own.
_PRIVATE = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async _assert_scalar _assert_tensor_metadata _batch_norm_no_update
    _conj _convolution _convolution_mode _fft_c2c _fft_c2r _fft_r2c _fused_rms_norm _infer_size _linalg_eigh
    _linalg_svd _list_to_tensor _local_scalar_dense _log_softmax _native_batch_norm_legit
    _native_batch_norm_legit_no_training _native_multi_head_attention _prelu_kernel _reshape_alias _safe_softmax
    _scaled_dot_product_attention_math _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _set_item _shape_as_tensor _softmax _tensor_to_list _to_copy
    _transformer_encoder_layer_fwd _unsafe_view _unwrap_optional _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _weight_norm _weight_norm_interface
    """.split()
)

_TORCHVISION = frozenset("deform_conv2d nms ps_roi_align ps_roi_pool roi_align roi_pool".split())

_PRIM = frozenset(
    """
    ModuleContainerIndex NumToTensor RaiseException StringIndex TupleIndex TupleUnpack Uninitialized abs data device
    dtype index is_cpu is_cuda is_meta is_mkldnn is_nested is_quantized is_sparse itemsize layout max min name rangelist
    requires_grad shape type unchecked_cast unchecked_unwrap_optional
    """.split()
)

#: Targets that are no dispatcher operators: arithmetic on symbolic sizes, and regions with grad or autocast switched.
_PLAIN_TARGETS = frozenset(
    [f"_operator.{name}" for name in "add sub mul truediv floordiv mod pow neg pos abs".split()]
    + [f"_operator.{name}" for name in "eq ne lt le gt ge and_ or_ xor not_ getitem".split()]
    + [f"math.{name}" for name in "ceil floor trunc sqrt".split()]
    + [f"torch.sym_{name}" for name in "float int ite max min not sqrt sum".split()]
    + ["torch._sym_sqrt"]
    + [f"torch.ops.higher_order.wrap_with_{name}" for name in ("set_grad_enabled", "autocast")]
)


def refuse_target(target: str) -> str | None:
    """Why an exported graph must not call `target`, or None.

    Parameters
    ----------
    target : as torch.export writes it, such as ``"torch.ops.aten.conv2d.default"``.

    Examples
    --------
    >>> refuse_target("torch.ops.aten.from_file.default")
    'it calls aten::from_file, which opens files'
    """
    if target in _PLAIN_TARGETS:
        return None
    # Exactly three parts: torch walks any dotted path by attribute, so "torch.hub.load" would be found as well.
    parts = re.fullmatch(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", target, re.ASCII)
    if parts is None or parts[3].startswith("_"):
        return f"it calls {target[:200]!r}, which is no operator that gpuml knows"
    return refuse_operator(parts[1], parts[2])


@functools.cache
def refuse_operator(namespace: str, name: str) -> str | None:
    """Why a model file must not call ``namespace::name``, or None.

    Examples
    --------
    >>> refuse_operator("aten", "relu")
    """
    known = {"torchvision": _TORCHVISION, "prim": _PRIM}
    if namespace in known:
        allowed = name in known[namespace]
        return None if allowed else f"it calls {namespace}::{name}, which gpuml does not know to be harmless"
    if namespace != "aten":
        return f"it calls {namespace}::{name}, and gpuml knows no harmless operators in {namespace!r}"
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    if not schemas:
        return f"it calls aten::{name}, which torch {torch.__version__} does not have"
    for reason, pattern in _REFUSED.items():
        if re.fullmatch(pattern, name.rstrip("_")):
            return f"it calls aten::{name}, which {reason}"
    if name.startswith("_") and not name.startswith("__") and name not in _PRIVATE:
        return f"it calls aten::{name}, a private operator that gpuml does not know to be harmless"
    types = [str(argument.type) for schema in schemas for argument in [*schema.arguments, *schema.returns]]
    if any(map(_NOT_DATA.search, types)):
        return f"it calls aten::{name}, which takes or gives more than tensors and plain values"
    return None
