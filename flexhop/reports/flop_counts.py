"""Work of a kernel: floating-point operations and bytes, from the problem."""

from __future__ import annotations

from flexhop.lowering.plan import Role
from flexhop.lowering.problem import Problem


def flops(kernel: Role, problem: Problem, pairs: int) -> int:
    """Operations of a kernel's matrix products.

    Args:
        kernel: which one.
        problem: the call.
        pairs: visited (query, key) pairs, over batches and query heads.

    A dot product of length `d` counts as 2 * d. The portable backward kernels each recompute the
    scores and the gradients of the weights. User functions are not counted.
    """
    qk, v = problem.head_dim, problem.value_head_dim
    columns = {
        "forward": qk + v,  # scores, out
        "decode": qk + v,
        "backward": 3 * qk + 2 * v,  # scores, grad_p, and the three gradients
        "gradients": 3 * qk + 2 * v,
        "grad_query": 2 * qk + v,  # scores, grad_p, grad_query
        "grad_key_value": 2 * qk + 2 * v,  # scores, grad_p, grad_value, grad_key
        "grad_key": 2 * qk + v,  # scores, grad_p, grad_key
        "grad_value": qk + v,  # scores, grad_value
    }
    return 2 * pairs * columns[kernel]


def least_bytes(kernel: Role, problem: Problem) -> int:
    """Bytes moved if every operand is read once and every result written once.

    Block lists and captured tensors are not counted. delta, which a separate reduction computes
    from out and grad_out, counts where it is read.
    """
    rows = problem.batch * problem.query_heads * problem.query_len
    kv_batch = 1 if problem.kv_batch_shared else problem.batch
    keys = kv_batch * problem.kv_heads * problem.key_len
    query = rows * problem.head_dim * problem.itemsize
    out = rows * problem.value_head_dim * problem.itemsize
    key = keys * problem.head_dim * problem.itemsize
    value = keys * problem.value_head_dim * problem.itemsize
    statistic = rows * 4
    forward = query + key + value + out + statistic * (1 + problem.returns_max)
    moved = {
        "forward": forward,
        "decode": forward,
        # The gradient of query is accumulated in fp32, then converted.
        "backward": query + 2 * key + 2 * value + out + 2 * statistic + 5 * query,
        "gradients": 2 * query + 2 * key + 2 * value + out + 2 * statistic,
        "grad_query": 2 * query + key + value + out + 2 * statistic,
        "grad_key_value": query + 2 * key + 2 * value + out + 2 * statistic,
        "grad_key": query + 2 * key + value + out + 2 * statistic,
        "grad_value": query + key + value + out + statistic,
    }
    return moved[kernel]


def dense_pairs(problem: Problem) -> int:
    """(query, key) pairs over batches and query heads."""
    return problem.batch * problem.query_heads * problem.query_len * problem.key_len
