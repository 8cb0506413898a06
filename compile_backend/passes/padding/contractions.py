"""Matrix products, normalisations, convolutions and attention."""

from collections.abc import Callable, Sequence
from typing import Any

from compile_backend.passes.padding.layout import Dim, Dims, broadcast, is_clean, is_leading, joined
from compile_backend.passes.padding.values import Case, Range, Value, aten, mixes_rows

__all__ = ["RULES", "SEEDED"]

# Tagged as random because of their dropout, which must be 0.
SEEDED = frozenset(
    f"{name}.default"
    for name in aten(
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_fused_attention_overrideable"
    )
)


def _finite(*values: Value | None) -> Range:
    return min(v.range for v in values if v is not None).unsigned


def _product(case: Case, left: Value, right: Value) -> Dims:
    """Dimensions of ``left @ right`` for operands of equal rank, at least 2."""
    case.clean(left, -1, f"{case.call.name} over the inner dimension")
    case.clean(right, -2, f"{case.call.name} over the inner dimension")
    batch = broadcast([left.dims[:-2], right.dims[:-2]])
    if batch is None:
        raise case.unsupported("its batches hold the padded rows in different orders")
    return (*batch, left.dims[-2], right.dims[-1])


def mm(case: Case) -> Value:
    left, right = case.value("self"), case.value("mat2")
    return Value(dims=_product(case, left, right), range=_finite(left, right))


def mv(case: Case) -> Value:
    left, right = case.value("self"), case.value("vec")
    case.clean(left, -1)
    case.clean(right, -1)
    return Value(dims=left.dims[:-1], range=_finite(left, right))


def addmm(case: Case) -> Value:
    """``self + left @ right``, whatever the operands are called."""
    bias = case.value("self")
    names = ("mat1", "mat2") if case.arg("mat1") is not None else ("batch1", "batch2")
    left, right = case.value(names[0]), case.value(names[1])
    dims = broadcast([bias.dims, _product(case, left, right)])
    if dims is None:
        raise case.unsupported("its bias holds the padded rows in another order")
    return Value(dims=dims, range=_finite(bias, left, right))


def addmv(case: Case) -> Value:
    bias, left, right = case.value("self"), case.value("mat"), case.value("vec")
    case.clean(left, -1)
    case.clean(right, -1)
    dims = broadcast([bias.dims, left.dims[:-1]])
    if dims is None:
        raise case.unsupported("its bias holds the padded rows in another order")
    return Value(dims=dims, range=_finite(bias, left, right))


def linear(case: Case) -> Value:
    value, weight, bias = case.value("input"), case.value("weight"), case.optional("bias")
    case.clean(value, -1, f"{case.call.name} over the features")
    case.clean(weight, -1, f"{case.call.name} over the features")
    if not weight.is_clean or (bias is not None and not bias.is_clean):
        raise case.unsupported("its weights differ from row to row")
    dims = (*value.dims[:-1], *weight.dims[:-1])
    return Value(dims=dims, range=_finite(value, weight, bias))


def layer_norm(case: Case) -> tuple[Value, ...]:
    """Also RMS norm. Statistics have the normalised dimensions at size 1."""
    value = case.value("input")
    count = len(case.arg("normalized_shape"))
    for dim in range(-count, 0):
        case.clean(value, dim, f"{case.call.name} over dimension {dim}")
    _require_clean(case, "weight", "bias")
    eps = case.arg("eps")
    settled = eps is None or (isinstance(eps, int | float) and eps > 0)  # rows of zeros exist
    finite = value.range.unsigned if settled else Range.ANY
    statistics = Value(dims=(*value.dims[:-count], *[()] * count))
    normed = Value(dims=value.dims, range=finite)
    return (normed, *[statistics] * (len(case.call.result) - 1))


def group_norm(case: Case) -> tuple[Value, ...]:
    value = case.value("input")
    for dim in range(1, len(value.dims)):
        case.clean(value, dim, f"{case.call.name} over dimension {dim}")
    _require_clean(case, "weight", "bias")
    normed = Value(dims=value.dims, range=value.range.unsigned)
    statistics = Value(dims=(value.dims[0], joined([case.result_sizes(1)[-1]])))
    return (normed, statistics, statistics)


def batch_norm(case: Case) -> tuple[Value | None, ...]:
    """With running statistics only: the batch's own would mix its rows."""
    value = case.value("input")
    if case.arg("training", False):
        raise mixes_rows(f"{case.call.name} in training mode", _padded(value))
    for dim in value.dims[1:2]:
        if not is_clean(dim):
            raise mixes_rows(f"{case.call.name} over channels", dim)
    if case.arg("running_mean") is None or case.arg("running_var") is None:
        raise mixes_rows(f"{case.call.name} without running statistics", _padded(value))
    _require_clean(case, "weight", "bias", "running_mean", "running_var")
    normed = Value(dims=value.dims, range=value.range.unsigned)
    return (normed, *[None] * (len(case.call.result) - 1))


def _require_clean(case: Case, *names: str) -> None:
    for name in names:
        value = case.optional(name)
        if value is not None and not value.is_clean:
            raise case.unsupported(f"its {name} differs from row to row")


def _padded(value: Value) -> Dim:
    return joined(atom for dim in value.dims for atom in dim if isinstance(atom, str))


def convolution(case: Case) -> Value:
    """The batch dimension may be padded. Channels and space may not."""
    value = case.value("input")
    for dim in range(1, len(value.dims)):
        case.clean(value, dim, f"{case.call.name} over dimension {dim}")
    _require_clean(case, "weight", "bias")
    dims = (value.dims[0], *[joined([size]) for size in case.result_sizes()[1:]])
    return Value(dims=dims, range=_finite(value, case.value("weight"), case.optional("bias")))


def _pool(num_spatial: int, name: str = "self") -> Callable[[Case], Any]:
    """Over the last dimensions, which must be clean; batch and channels are kept apart."""

    def rule(case: Case) -> Any:
        value = case.value(name)
        for dim in range(-num_spatial, 0):
            case.clean(value, dim)
        result = case.call.result
        sizes = case.result_sizes(None if not isinstance(result, tuple | list) else 0)
        spatial = [joined([size]) for size in sizes[-num_spatial:]]
        pooled = Value(dims=(*value.dims[:-num_spatial], *spatial), range=value.range.unsigned)
        return (pooled,) * len(result) if isinstance(result, tuple | list) else pooled

    return rule


def attention(case: Case) -> tuple[Value | None, ...] | Value:
    """Queries look at keys of the same sequence; causal ones at earlier positions only.

    Batch and head dimensions may be padded, and so may the queries. Padded keys are harmless
    under a causal mask alone, if they are finite: their weight is 0, and 0 times infinity is not 0.
    """
    query, key, value = case.value("query"), case.value("key"), case.value("value")
    mask = case.optional("attn_mask") or case.optional("attn_bias")
    causal = bool(case.arg("is_causal", False))
    name = case.call.name
    for operand in (query, key, value):
        case.clean(operand, -1, f"{name} over the features")
    batch = broadcast([operand.dims[:-2] for operand in (query, key, value)])
    rows, keys = query.dims[-2], key.dims[-2]
    if batch is None or keys != value.dims[-2]:
        raise case.unsupported("its operands hold the padded rows in different orders")
    if not is_clean(keys):
        if not causal or mask is not None:
            raise mixes_rows(f"{name} over the keys", keys)
        if rows != keys or not is_leading(keys):
            raise mixes_rows(f"{name} of other queries than keys", keys)
        if _finite(query, key, value) is Range.ANY:
            raise case.unsupported("a padded row may be infinite, and 0 times infinity is not 0")
    elif causal and not is_clean(rows):
        raise case.unsupported("its causal mask is aligned by the padded number of queries")
    if mask is not None and broadcast([mask.dims, (*batch, rows, keys)]) != (*batch, rows, keys):
        raise case.unsupported("its mask holds the padded rows in another order")
    finite = Range.ANY if mask is not None else _finite(query, key, value)
    out = Value(dims=(*batch, rows, value.dims[-1]), range=finite)
    result: Sequence[Any] = case.call.result
    return (out, *[None] * (len(result) - 1))


def encoder_layer(case: Case) -> Value:
    """The fused inference path of ``nn.TransformerEncoderLayer``: attention over dimension 1."""
    value = case.value("src")
    _require_plain_attention(case, [value])
    return Value(dims=value.dims, range=value.range.unsigned)


def self_attention(case: Case) -> tuple[Value | None, ...]:
    """The fused inference path of ``nn.MultiheadAttention``."""
    operands = [case.value(name) for name in ("query", "key", "value")]
    _require_plain_attention(case, operands)
    if len({operand.dims[0] for operand in operands}) > 1:
        raise case.unsupported("its operands hold the padded rows in different orders")
    return (Value(dims=operands[0].dims, range=_finite(*operands)), None)


def _require_plain_attention(case: Case, operands: list[Value]) -> None:
    """No mask, weights shared by all rows, and nothing padded but the batch dimension."""
    if case.arg("mask") is not None:
        raise case.unsupported("its mask is not looked into")
    for operand in operands:
        for dim in range(1, len(operand.dims)):
            case.clean(operand, dim, f"{case.call.name} over dimension {dim}")
    for tensor in case.call.tensors:
        found = case.values[id(tensor)]
        if not found.is_clean and found not in operands:
            raise case.unsupported("its weights differ from row to row")


RULES: dict[str, Callable[[Case], Any]] = {
    **dict.fromkeys(aten("mm bmm _int_mm"), mm),
    **dict.fromkeys(aten("mv"), mv),
    **dict.fromkeys(aten("addmm baddbmm"), addmm),
    **dict.fromkeys(aten("addmv"), addmv),
    **dict.fromkeys(aten("linear"), linear),
    **dict.fromkeys(aten("native_layer_norm _fused_rms_norm"), layer_norm),
    **dict.fromkeys(aten("native_group_norm"), group_norm),
    **dict.fromkeys(
        aten(
            "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
            "cudnn_batch_norm miopen_batch_norm"
        ),
        batch_norm,
    ),
    **dict.fromkeys(aten("convolution _convolution"), convolution),
    **dict.fromkeys(
        aten(
            "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d "
            "upsample_nearest2d upsample_bilinear2d"
        ),
        _pool(2),
    ),
    **dict.fromkeys(aten("_adaptive_avg_pool1d upsample_nearest1d upsample_linear1d"), _pool(1)),
    **dict.fromkeys(aten("max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d"), _pool(3)),
    **dict.fromkeys(
        aten("upsample_nearest2d.vec upsample_bilinear2d.vec _upsample_bilinear2d_aa.vec"),
        _pool(2, name="input"),
    ),
    **dict.fromkeys(SEEDED, attention),
    **dict.fromkeys(aten("_transformer_encoder_layer_fwd"), encoder_layer),
    **dict.fromkeys(aten("_native_multi_head_attention"), self_attention),
}
