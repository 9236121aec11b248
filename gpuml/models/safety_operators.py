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
import torchvision  # noqa: F401  # registers its operators

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
_PRIVATE = re.compile(
    r"_adaptive_avg_pool[23]d|_assert_(async|scalar|tensor_metadata)|_batch_norm_no_update|_conj|_convolution(_mode)?"
    r"|_fft_(c2c|c2r|r2c)|_fused_rms_norm|_infer_size|_linalg_(eigh|svd)|_list_to_tensor|_local_scalar_dense"
    r"|_(log_|safe_)?softmax|_native_batch_norm_legit(_no_training)?|_native_multi_head_attention|_prelu_kernel"
    r"|_reshape_alias|_scaled_dot_product_(attention_math|efficient_attention|flash_attention(_for_cpu)?)|_set_item"
    r"|_shape_as_tensor|_tensor_to_list|_to_copy|_transformer_encoder_layer_fwd|_unique2|_unsafe_view|_unwrap_optional"
    r"|_upsample_(bicubic2d_aa|bilinear2d_aa|nearest_exact[12]d)|_weight_norm(_interface)?|__.*"
)

#: Harmless operators of other namespaces.
_OTHERS = {
    "torchvision": re.compile(r"deform_conv2d|nms|(ps_)?roi_(align|pool)"),
    "prim": re.compile(
        r"ModuleContainerIndex|NumToTensor|RaiseException|StringIndex|TupleIndex|TupleUnpack|Uninitialized|abs|data"
        r"|device|dtype|index|is_(cpu|cuda|meta|mkldnn|nested|quantized|sparse)|itemsize|layout|max|min|name|rangelist"
        r"|requires_grad|shape|type|unchecked_(cast|unwrap_optional)"
    ),
}

#: Targets that are no dispatcher operators: arithmetic on symbolic sizes, and regions with grad or autocast switched.
_PLAIN_TARGETS = re.compile(
    r"_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|xor|not_|getitem)"
    r"|math\.(ceil|floor|trunc|sqrt)|torch\.sym_(float|int|ite|max|min|not|sqrt|sum)|torch\._sym_sqrt"
    r"|torch\.ops\.higher_order\.wrap_with_(set_grad_enabled|autocast)"
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
    if _PLAIN_TARGETS.fullmatch(target):
        return None
    # Exactly three parts: torch walks any dotted path by attribute, so "torch.hub.load" would be found as well.
    parts = re.fullmatch(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", target, re.ASCII)
    if parts is None or parts[3] not in _overloads(parts[1], parts[2]):
        return f"it calls {target[:200]!r}, which is no operator that gpuml knows"
    return refuse_operator(parts[1], parts[2])


@functools.cache
def _overloads(namespace: str, name: str) -> frozenset[str]:
    """The overloads of an operator: any other attribute of it, such as ``overloads``, is Python of torch's own."""
    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}")
    return frozenset(schema.overload_name or "default" for schema in schemas)


@functools.cache
def refuse_operator(namespace: str, name: str) -> str | None:
    """Why a model file must not call ``namespace::name``, or None.

    Examples
    --------
    >>> refuse_operator("aten", "relu")
    """
    if namespace in _OTHERS:
        allowed = _OTHERS[namespace].fullmatch(name)
        return None if allowed else f"it calls {namespace}::{name}, which gpuml does not know to be harmless"
    if namespace != "aten":
        return f"it calls {namespace}::{name}, and gpuml knows no harmless operators in {namespace!r}"
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    if not schemas:
        return f"it calls aten::{name}, which torch {torch.__version__} does not have"
    for reason, pattern in _REFUSED.items():
        if re.fullmatch(pattern, name.rstrip("_")):
            return f"it calls aten::{name}, which {reason}"
    if name.startswith("_") and not _PRIVATE.fullmatch(name):
        return f"it calls aten::{name}, a private operator that gpuml does not know to be harmless"
    types = [str(argument.type) for schema in schemas for argument in [*schema.arguments, *schema.returns]]
    if any(map(_NOT_DATA.search, types)):
        return f"it calls aten::{name}, which takes or gives more than tensors and plain values"
    return None
