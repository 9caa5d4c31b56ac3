"""eaves.linear_cross_entropy of a head that is cut over ranks, against the float64 oracle of the whole head, with gloo
on the CPU. A function that takes a group runs on each rank; the test below the function starts it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import eaves
from comparison import assert_agree, assert_within
from cross_entropy_test import OPTIONS, REDUCTIONS, each, every_output, upstream_of
from eaves._parallel import agreement as _ranks
from head_ranks import CLASSES, over, pieces, problem_of
from linear_cross_entropy_cases import LinearOracle, assert_gradients
from linear_cross_entropy_test import problem, soft_targets
from pairwise import pairwise
from ranks import Ranks, here

ALGORITHMS = ("speed", "recompute")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def on_a_rank(
    group: distributed.ProcessGroup,
    is_even: bool,
    x: Tensor,
    head: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    outputs: tuple[str, ...],
    options: dict[str, Any],
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """The outputs, and this rank's gradients for upstream gradients of loss, lse and entropy."""
    own, rows = pieces(group.size(), is_even)[group.rank()], slice(None)
    if options.get("sequence_parallel"):
        size = x.shape[0] // group.size()
        rows = slice(group.rank() * size, (group.rank() + 1) * size)
    if target.is_floating_point():
        target = target[..., own]
    given = [x[rows], head[own], None if bias is None else bias[own]]
    leaves = [None if each is None else each.detach().clone().requires_grad_() for each in given]
    out = eaves.linear_cross_entropy(
        leaves[0], leaves[1], target, linear_bias=leaves[2], weight=None if weight is None else weight[own],
        outputs=outputs, **over(group, options),
    )  # fmt: skip
    found = out._asdict() if outputs else {"loss": out}
    differentiable = {name: each for name, each in found.items() if name in ("loss", "lse", "entropy")}
    torch.autograd.backward([*differentiable.values()], [upstream_of(*each) for each in differentiable.items()])
    return {name: each.detach() for name, each in found.items()}, [None if e is None else e.grad for e in leaves]


def check(
    ranks: Ranks,
    count: int,
    is_even: bool,
    x: Tensor,
    head: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    outputs: tuple[str, ...],
    **options: Any,
) -> None:
    of_oracle = {name: value for name, value in options.items() if name in ("reduction", *_OF_ORACLE)}
    oracle = LinearOracle(x, head, target, bias, weight, **of_oracle)
    what = f"{count} ranks {x.dtype} {options}"
    results = ranks.run(on_a_rank, is_even, x, head, target, bias, weight, outputs, options, ranks=count)
    values, gradients = zip(*results, strict=True)
    assert tuple(values[0]) == ("loss", *outputs)
    for name, found in values[0].items():
        assert all(torch.equal(found, each[name]) for each in values[1:]), f"{name} {what}"
        if name == "argmax":
            assert torch.equal(found, torch.where(oracle.rows.counts, oracle.rows.argmax, 0)), what
        else:
            assert_within(found, oracle.bounds(found.dtype)[name], f"{name} {what}")
    upstreams = [upstream_of(name, values[0].get(name)) for name in ("loss", "lse", "entropy")]
    of_input, of_head, of_bias = ([each[place] for each in gradients] for place in range(3))
    if not options.get("sequence_parallel"):
        assert all(torch.equal(each, of_input[0]) for each in of_input), what
        of_input = of_input[:1]
    whole = (torch.cat(of_input), torch.cat(of_head), None if bias is None else torch.cat(of_bias))
    assert_gradients(whole, oracle.gradients(*upstreams), x.dtype, what)


_OF_ORACLE = ("label_smoothing", "softcap", "scale", "z_loss", "row_weight", "normalizer", "ignore_index")


# With these options only the gradient of the logits is rounded to 16 bits, and each gradient once, whatever the number
# of ranks and chunks.
_ROUNDED_ONCE = {"reduce_dtype": torch.float32, "grad_weight_dtype": torch.float32}


CALLS = pairwise(
    (1, 2, 3, 4), (False, True), DTYPES, (*ALGORITHMS, "memory"), REDUCTIONS, [{}, *OPTIONS], (False, True),
    (False, True), (False, True), (False, True), (None, 7.0), (None, 12_000),
)  # fmt: skip


@each("count", (1, 2, 3, 4))
def test_every_argument_arrives_and_matches_the_oracle(count: int, ranks: Ranks) -> None:
    for ranks_of_call, is_even, dtype, algorithm, reduction, options, *flags, normalizer, limit in CALLS:
        if ranks_of_call != count:
            continue
        is_soft, is_weighted, has_row_weight, is_parallel = flags
        x, head, target, bias = problem((12, 2, 16), CLASSES, dtype, here())
        target = soft_targets(x.shape, CLASSES, here(), dtype) if is_soft else target
        weight = torch.linspace(0, 2, CLASSES).to(dtype) if is_weighted else None
        named = {
            "reduction": reduction, "algorithm": algorithm, "workspace_bytes": limit, "sequence_parallel": is_parallel,
            **options, **(_ROUNDED_ONCE if dtype.itemsize == 2 else {}),
        }  # fmt: skip
        if has_row_weight:
            named["row_weight"] = torch.linspace(0, 3, 24).view(12, 2)
        if normalizer is not None and reduction == "mean":
            named["normalizer"] = normalizer
        outputs = () if has_row_weight else every_output(target, weight, **named)["outputs"]
        check(ranks, count, is_even, x, head, target, bias, weight, outputs, **named)


@each("sequence_parallel", (False, True))
@each("algorithm", ALGORITHMS)
def test_rows_that_do_not_count_may_hold_anything(algorithm: str, sequence_parallel: bool, ranks: Ranks) -> None:
    row_weight = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 0.0, 1.0, 1.0], device=here())
    for is_soft, weights in ((False, None), (False, row_weight), (True, row_weight)):
        x, head, target, bias = problem((8, 16), CLASSES, torch.float32, here())
        target = soft_targets(x.shape, CLASSES, here(), x.dtype) if is_soft else target
        leaves_out = target == -100 if weights is None else weights == 0
        oracle = LinearOracle(x.masked_fill(leaves_out.unsqueeze(1), 0), head, target, bias, row_weight=weights)
        x[leaves_out] = torch.nan if is_soft else torch.inf
        named = {"sequence_parallel": sequence_parallel, "algorithm": algorithm, "row_weight": weights}
        results = ranks.run(
            on_a_rank, True, x, head, target, bias, None, ("lse", "entropy"), {**named, "skip_ignored": True}, ranks=2
        )
        outputs = results[0][0]
        for name, found in outputs.items():
            assert_within(found, oracle.bounds(found.dtype)[name], name)
        of_input, of_head = ([gradients[place] for _, gradients in results] for place in range(2))
        whole = torch.cat(of_input) if sequence_parallel else of_input[0]
        upstreams = [upstream_of(name, outputs[name]) for name in ("loss", "lse", "entropy")]
        assert_gradients((whole, torch.cat(of_head), None), oracle.gradients(*upstreams), torch.float32)


def test_without_rows_that_count_loss_and_gradients_are_0(ranks: Ranks) -> None:
    x, head, target, bias = problem((8, 16), CLASSES, torch.float32, here())
    for outputs, gradients in ranks.run(on_a_rank, True, x, head, target.fill_(-100), bias, None, (), {}):
        assert outputs["loss"] == 0 and all(torch.count_nonzero(each) == 0 for each in gradients)
    no_rows = ranks.run(on_a_rank, True, x[:0], head, target[:0], bias, None, (), {"reduction": "none"})
    assert all(outputs["loss"].shape == (0,) for outputs, _ in no_rows)


def padded(group: distributed.ProcessGroup, algorithm: str, is_soft: bool) -> None:
    x, head, target, bias = problem((24, 16), CLASSES, torch.float64, here())
    target.clamp_(max=16)
    if is_soft:
        target = soft_targets(x.shape, CLASSES, here(), x.dtype)
        target[:, 17:] = torch.nan
    weight = torch.linspace(0.5, 2, CLASSES, dtype=x.dtype, device=here())
    head[17:], bias[17:], weight[17:] = torch.nan, torch.nan, torch.nan
    whole = [each.clone().requires_grad_() for each in (x, head[:17], bias[:17])]
    of_whole = target[:, :17] if is_soft else target
    named = {"weight": weight[:17], "algorithm": algorithm}
    exact = eaves.linear_cross_entropy(*whole[:2], of_whole, linear_bias=whole[2], **named)
    exact.backward()
    own = pieces(group.size())[group.rank()]
    for classes, named in ((own, {"group": group}), (slice(None), {})):
        leaves = [each.clone().requires_grad_() for each in (x, head[classes], bias[classes])]
        given = target[:, classes] if is_soft else target
        loss = eaves.linear_cross_entropy(
            *leaves[:2], given, linear_bias=leaves[2], weight=weight[classes], classes=17, algorithm=algorithm, **named
        )
        assert_agree(loss, exact)
        loss.backward()
        assert_agree(leaves[0].grad, whole[0].grad)
        for leaf, expected in zip(leaves[1:], whole[1:]):
            all_classes = torch.cat([expected.grad, expected.new_zeros(CLASSES - 17, *expected.shape[1:])])
            assert_agree(leaf.grad, all_classes[own] if named else all_classes)


@each("algorithm", ALGORITHMS)
@each("is_soft", (False, True))
def test_classes_of_padding_are_neither_read_nor_counted(is_soft: bool, algorithm: str, ranks: Ranks) -> None:
    ranks.run(padded, algorithm, is_soft)


def resized(group: distributed.ProcessGroup, algorithm: str) -> None:
    for classes in (CLASSES, CLASSES - 9):
        x, head, target, _ = problem((24, 16), classes, torch.float64, here())
        own = slice(0, 10) if group.rank() == 0 else slice(10, classes)
        whole, parts = ([each.clone().requires_grad_() for each in (x, cut)] for cut in (head, head[own]))
        expected = eaves.linear_cross_entropy(*whole, target, algorithm=algorithm)
        loss = eaves.linear_cross_entropy(*parts, target, algorithm=algorithm, group=group)
        torch.autograd.backward([expected, loss])
        assert_agree(loss, expected)
        assert_agree(parts[0].grad, whole[0].grad)
        assert_agree(parts[1].grad, whole[1].grad[own])


def resized_late(group: distributed.ProcessGroup, algorithm: str) -> None:
    expects_last = _ranks._expects_last
    _ranks._places.clear()
    _ranks._unsteady.clear()
    try:
        _ranks._expects_last = lambda target: True
        resized(group, algorithm)
    finally:
        _ranks._expects_last = expects_last
    # The first rank's part has 10 classes both times, but the whole head differs.
    assert [columns for _, columns in _ranks._unsteady] == ([10] if group.rank() == 0 else [])


@each("algorithm", ALGORITHMS)
def test_what_was_computed_for_another_place_is_computed_again(algorithm: str, cpu_ranks: Ranks) -> None:
    # On a GPU a call computes with the last call's place while the ranks compare their arguments.
    cpu_ranks.run(resized_late, algorithm, ranks=2)


@each("value", ("", "0", "1"))
def test_targets_that_are_checked_wait_for_the_place(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAVES_CHECK_TARGETS", value)  # as in the core, an empty value and 0 check nothing
    with FakeTensorMode():
        assert _ranks._expects_last(torch.empty(3, dtype=torch.int64, device="cuda")) == (value != "1")


def input_gradients(group: distributed.ProcessGroup, options: dict[str, Any]) -> Tensor:
    x, _, target, own = problem_of(group)
    x.requires_grad_()  # the head is frozen
    eaves.linear_cross_entropy(x, own, target, **over(group, options)).sum().backward()
    assert x.grad is not None
    return x.grad


def test_the_gradient_of_input_may_stay_in_parts(ranks: Ranks) -> None:
    for algorithm, reduction in pairwise(ALGORITHMS, REDUCTIONS):
        named = {"algorithm": algorithm, "reduction": reduction}
        whole = ranks.run(input_gradients, named)[0]
        parts = ranks.run(input_gradients, {**named, "reduce_input_grad": False})
        assert_agree(torch.stack(parts).sum(0), whole)


def accumulated(group: distributed.ProcessGroup, dtype: torch.dtype, algorithm: str) -> tuple[Tensor, Tensor]:
    x, head, target, bias = problem((24, 16), CLASSES, dtype, here())
    mine = pieces(group.size())[group.rank()]
    own, own_bias = head[mine].requires_grad_(), bias[mine].double().to(bias.dtype).requires_grad_()
    total = own.new_zeros(own.shape, dtype=torch.promote_types(dtype, torch.float32))
    tokens = (target != -100).sum()
    for rows in (slice(0, 10), slice(10, 24)):
        loss = eaves.linear_cross_entropy(
            x[rows].requires_grad_(), own, target[rows], linear_bias=own_bias, group=group, normalizer=tokens,
            grad_weight_out=total, algorithm=algorithm,
        )  # fmt: skip
        loss.backward()
    assert own.grad is None
    return total, own_bias.grad


def test_gradients_of_micro_batches_are_added_up(ranks: Ranks) -> None:
    for dtype, algorithm in pairwise((torch.float64, torch.bfloat16), (*ALGORITHMS, "auto")):
        x, head, target, bias = problem((24, 16), CLASSES, dtype, here())
        exact = LinearOracle(x, head, target, bias).gradients()
        total, of_bias = map(torch.cat, zip(*ranks.run(accumulated, dtype, algorithm), strict=True))
        assert_gradients((None, total, of_bias), exact, dtype)


def a_second_backward_computes_again_and_has_no_derivative(group: distributed.ProcessGroup, algorithm: str) -> None:
    x, _, target, own = problem_of(group)
    leaves = [x.requires_grad_(), own.requires_grad_()]
    loss = eaves.linear_cross_entropy(
        *leaves, target, group=eaves.Shard(group, pieces(group.size())[group.rank()].start), algorithm=algorithm
    )
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    for one, two in zip(first, second):
        assert_agree(2 * one, two)
    (grad,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


@each("algorithm", ALGORITHMS)
@each("function", (resized, a_second_backward_computes_again_and_has_no_derivative))
def test_a_call_after_another(function: Callable[..., None], algorithm: str, ranks: Ranks) -> None:
    ranks.run(function, algorithm, ranks=2)


def cancelling(
    group: distributed.ProcessGroup, reduce_dtype: torch.dtype | None, is_of_tokens: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of this head have much in common. It cancels in the gradient of input, which is a small remainder."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(8, 64, generator=generator).half().to(here()).requires_grad_()
    head = (torch.randn(512, 64, generator=generator) + 10).half().to(here())
    target = torch.randint(0, 512, (8,), generator=generator).to(here())
    whole = x.detach().double().requires_grad_()
    eaves.linear_cross_entropy(whole, head.double(), target, reduction="sum").mul(10000).backward()
    own, shard = head.chunk(group.size())[group.rank()], eaves.Shard(group, reduce_dtype=reduce_dtype)
    if is_of_tokens:  # one of K
        loss = -eaves.linear_log_prob(x, own, target.unsqueeze(1), group=shard).sum()
    else:
        loss = eaves.linear_cross_entropy(x, own, target, reduction="sum", group=shard)
    (loss * 10000).backward()
    alone = x.detach().requires_grad_()
    (eaves.linear_cross_entropy(alone, head, target, reduction="sum") * 10000).backward()
    return x.grad, whole.grad, alone.grad


def test_parts_of_float16_are_added_in_float32(ranks: Ranks) -> None:
    for is_of_tokens in (False, True):
        found, exact, alone = ranks.run(cancelling, None, is_of_tokens)[0]
        assert found.isfinite().all()  # sums in float16 are not
        # The error is as large as a single rank's: the gradient of the logits is rounded once, and so is the sum.
        assert (found.double() - exact).norm() <= 1.15 * (alone.double() - exact).norm()
    parts, _, _ = ranks.run(cancelling, torch.float16)[0]
    assert not parts.isfinite().all()
    refused = ranks.refusals(cancelling, torch.bfloat16)
    assert all("reduce_dtype is bfloat16, expected float16 or float32" in message for _, message in refused)


def compiled(group: distributed.ProcessGroup, algorithm: str, reduction: str, sequence_parallel: bool) -> None:
    x, _, target, own = problem_of(group)
    if sequence_parallel:
        x = x[12 * group.rank() : 12 * group.rank() + 12]

    def loss_of(x: Tensor, head: Tensor) -> Tensor:
        shard = eaves.Shard(group, sequence_parallel=sequence_parallel)
        options: dict[str, Any] = {"group": shard, "algorithm": algorithm, "reduction": reduction}
        return eaves.linear_cross_entropy(x * 2, head, target, **options).sum()

    torch.compiler.reset()  # each combination of options compiles again
    found = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_(), own.clone().requires_grad_()]
        loss = function(*leaves)
        loss.backward()
        found.append([loss.detach(), *[each.grad for each in leaves]])
    for eager, of_graph in zip(*found):
        assert_agree(of_graph, eager)


def test_it_compiles_without_a_graph_break(ranks: Ranks) -> None:
    for arguments in pairwise(("auto", *ALGORITHMS), REDUCTIONS, (False, True)):
        ranks.run(compiled, *arguments, ranks=2)


def a_compiled_call_is_made_where_nothing_uses_its_result(group: distributed.ProcessGroup) -> float:
    x, _, target, own = problem_of(group)

    def of_one_rank(x: Tensor) -> Tensor:
        loss = eaves.linear_cross_entropy(x, own, target, group=group)
        return loss if group.rank() == 0 else x.sum()

    return torch.compile(of_one_rank, fullgraph=True, backend="aot_eager")(x).item()


def it_is_computed_again_in_a_checkpoint(group: distributed.ProcessGroup) -> None:
    x, _, target, own = problem_of(group)
    own.requires_grad_()
    found = []
    for is_checkpointed in (False, True):
        leaf = x.clone().requires_grad_()

        def loss_of(rows: Tensor) -> Tensor:
            return eaves.linear_cross_entropy(rows.sin(), own, target, group=group)

        loss = checkpoint(loss_of, leaf, use_reentrant=False) if is_checkpointed else loss_of(leaf)
        assert isinstance(loss, Tensor)
        loss.backward()
        loss_of(leaf).backward()  # a second call on the same group
        found.append(leaf.grad)
    assert torch.equal(*found)


def modules_take_a_group(group: distributed.ProcessGroup) -> None:
    x, head, target, own = problem_of(group)
    linear = eaves.LinearCrossEntropyLoss(z_loss=0.1)
    assert_agree(linear(x, own, target, group=group), linear(x, head, target))
    loss = eaves.CrossEntropyLoss(z_loss=0.1)
    assert_agree(loss(x @ own.T, target, group=group), loss(x @ head.T, target))


@each("function", [a_compiled_call_is_made_where_nothing_uses_its_result, it_is_computed_again_in_a_checkpoint,
                   modules_take_a_group])  # fmt: skip
def test_on_each_rank(function: Callable[..., object], ranks: Ranks) -> None:
    ranks.run(function)


def a_dtensor_says_which_group(group: distributed.ProcessGroup) -> None:
    x, head, target, bias = problem((24, 16), CLASSES - 1, torch.float64, here())  # 39 classes, 4 ranks: 10, 10, 10, 9
    whole = [each.clone().requires_grad_() for each in (x, head, bias)]
    expected = eaves.linear_cross_entropy(*whole[:2], target, linear_bias=whole[2])
    expected.backward()
    mesh = DeviceMesh.from_group(group, "cpu")

    def cut(tensor: Tensor, *placements: Any) -> DTensor:
        return distribute_tensor(tensor.detach(), mesh, placements).requires_grad_()

    for of_rows in (None, Replicate(), Shard(0)):
        leaves = [x.clone().requires_grad_() if of_rows is None else cut(x, of_rows), cut(head, Shard(0))]
        leaves.append(cut(bias, Shard(0)))
        loss = eaves.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2])
        loss.backward()
        assert_agree(loss, expected)
        for leaf, wanted in zip(leaves, whole):
            grad = leaf.grad
            assert_agree(grad.full_tensor() if isinstance(grad, DTensor) else grad, wanted.grad)
    soft = soft_targets(x.shape, CLASSES - 1, here(), x.dtype)
    for placement in (Shard(1), Replicate()):
        loss = eaves.linear_cross_entropy(x, cut(head, Shard(0)), distribute_tensor(soft, mesh, [placement]))
        assert_agree(loss, eaves.linear_cross_entropy(x, head, soft))
    with pytest.raises(NotImplementedError, match=r"DTensor with the placements \['S\(1\)'\]"):
        eaves.linear_cross_entropy(x, cut(head, Shard(1)), target)
    with pytest.raises(ValueError, match="which knows its group"):
        eaves.linear_cross_entropy(x, cut(head, Shard(0)), target, group=group)


def logits_far_from_zero_keep_their_gradient(group: distributed.ProcessGroup) -> None:
    # Logits of 4096 and multiples of 1/256, exact in float32. A float32 lse is off by up to 2.4e-4 there.
    x = torch.arange(32.0).view(8, 4) % 3 + 1
    head = ((torch.arange(4 * CLASSES) * 37) % 256 / 256).view(CLASSES, 4)
    target = torch.arange(8) * 5 % CLASSES
    own = pieces(group.size())[group.rank()]
    part, bias = head[own].clone().requires_grad_(), torch.full((len(head[own]),), 4096.0, requires_grad=True)
    eaves.linear_cross_entropy(x, part, target, linear_bias=bias, algorithm="recompute", group=group).backward()
    wide = torch.full((CLASSES,), 4096.0, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.cross_entropy(x.double() @ head.double().t() + wide, target).backward()
    assert ((bias.grad - wide.grad[own]).abs() <= 4e-6 * wide.grad[own].abs()).all()


def rows_may_lie_in_another_order(group: distributed.ProcessGroup) -> None:
    x, head, target, part = problem_of(group)
    x, target = x.view(4, 6, -1).transpose(0, 1), target.view(6, 4)
    leaves = [x.detach().requires_grad_(), part.clone().requires_grad_()]
    whole = [x.contiguous().requires_grad_(), head.clone().requires_grad_()]
    for (hidden, weight), options in ((leaves, {"group": group}), (whole, {})):
        loss = eaves.linear_cross_entropy(hidden, weight, target, reduction="none", **options)
        loss.backward(upstream_of("loss", loss))
    assert_agree(eaves.linear_cross_entropy(*leaves, target, reduction="none", group=group), loss)
    assert_agree(leaves[0].grad, whole[0].grad)
    assert_agree(leaves[1].grad, whole[1].grad[pieces(group.size())[group.rank()]])


@each(
    "function",
    (a_dtensor_says_which_group, logits_far_from_zero_keep_their_gradient, rows_may_lie_in_another_order),
)
def test_on_each_rank_of_a_cpu(function: Callable[..., object], cpu_ranks: Ranks) -> None:
    cpu_ranks.run(function)
