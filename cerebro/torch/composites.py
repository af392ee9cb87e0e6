"""PyTorch's composite operators that may be in a recorded step.

A composite operator has no kernel: it calls others. The source of each of these was checked: it
computes nothing itself, and reads no memory without an operator. A step with any other composite
operator is not recorded; the log names the operator.
"""

from __future__ import annotations

COMPOSITES = frozenset(
    """
    _batch_norm_impl_index _batch_norm_impl_index_backward _convolution_double_backward
    _convolution_mode _pad_enum _scaled_dot_product_attention_math
    _thnn_differentiable_gru_cell_backward _thnn_differentiable_lstm_cell_backward _weight_norm
    _weight_norm_differentiable_backward absolute adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d affine_grid_generator_backward alpha_dropout
    atleast_1d atleast_2d atleast_3d avg_pool1d batch_norm bilinear broadcast_tensors
    broadcast_to chunk clip clip_ column_stack concat concatenate contiguous conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d conv_transpose3d cosine_embedding_loss
    cosine_similarity cross_entropy_loss cudnn_is_acceptable cummaxmin_backward cumprod_backward
    diff divide divide_ dropout dropout_ dstack einsum embedding_backward embedding_bag
    expand_as feature_alpha_dropout feature_dropout flatten fliplr flipud gather_backward ger
    greater greater_equal group_norm gru gru_cell hinge_embedding_loss hsplit hstack
    index_select_backward infinitely_differentiable_gelu_backward inner instance_norm isfinite
    isreal item kl_div kron l1_loss layer_norm less less_equal linalg_matmul linalg_matrix_norm
    linalg_multi_dot linalg_norm linear log_sigmoid log_softmax logdet lstm lstm_cell mH mT
    margin_ranking_loss masked_select_backward matmul max_pool1d max_pool1d_with_indices
    max_pool2d max_pool3d meshgrid moveaxis movedim multiply multiply_ narrow negative nll_loss
    nll_loss2d nll_loss_nd not_equal numpy_T outer pad pairwise_distance poisson_nll_loss prelu
    ravel relu6 relu6_ reshape reshape_as rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell
    rrelu rrelu_ scaled_dot_product_attention selu selu_ softmax square square_ std std_mean
    subtract subtract_ sum_to_size swapaxes swapaxes_ swapdims tensor_split tensordot to
    trace_backward trapezoid trapz triplet_margin_loss true_divide type_as unflatten
    unsafe_chunk upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    value_selecting_reduction_backward var var_mean view_as vsplit vstack where
    inverse linalg_inv linalg_solve linalg_det det slogdet linalg_slogdet linalg_matrix_power
    """.split()  # noqa: SIM905
)
"""Names without ``aten::``."""

UNSAFE_OVERLOADS = frozenset(
    {
        "gru@data",
        "lstm@data",
        "rnn_relu@data",
        "rnn_tanh@data",
        "tensor_split@tensor_indices_or_sections",
    }
)
"""Their overloads that read lengths or indices from the memory of a tensor."""


def is_reviewed(name: str, overload: str) -> bool:
    """Return whether a composite operator, such as ``aten::linear``, may be in a recorded step."""
    short = name.removeprefix("aten::")
    return short in COMPOSITES and f"{short}@{overload}" not in UNSAFE_OVERLOADS
