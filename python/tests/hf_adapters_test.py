"""eaves.hf: heads with LoRA, in modules_to_save or with trainable tokens of PEFT, against the same models unpatched."""

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves.hf
from eaves._autograd.linear_cross_entropy import OF_BIAS, OF_HEAD, OF_HIDDEN
from eaves.hf.deferred_logits import DeferredLogits
from eaves.hf.distillation import deferred
from eaves.hf.head import logits_of_adapter
from hf_models import (
    FLOAT32_TOLERANCE,
    LENGTH,
    OF_TINY_MODELS,
    VOCABULARY,
    Step,
    assert_same_step,
    batch,
    distance,
    gradients_asked_for,
    refuse_logits,
    step,
    tiny_model,
    transformers,
)

peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = OF_TINY_MODELS

PEFT = tuple(map(int, peft.__version__.split(".")[:2]))
TOKENS = batch()["input_ids"].unique()[:5].tolist()

# The model, and the configuration of the adapter. r = 3 needs padded features.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "LoRA, tied": ("qwen2", {"target_modules": ["lm_head", "q_proj"]}),
    "LoRA, head and embedding tied": (
        "qwen2", {"target_modules": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
    ),
    "LoRA, soft cap": ("gemma2", {"target_modules": ["lm_head", "q_proj"]}),
    "LoRA, bias of the head": ("phi", {"target_modules": ["lm_head"], "lora_bias": True, "bias": "all"}),
    "LoRA, bias": ("llama", {"target_modules": ["lm_head"], "lora_bias": True}),
    "LoRA, no padding": ("llama", {"target_modules": ["lm_head"], "r": 8}),
    "rsLoRA, dropout": ("llama", {"target_modules": ["lm_head"], "use_rslora": True, "lora_dropout": 0.5}),
    "modules_to_save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "modules_to_save, tied": ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "modules_to_save, head and embedding tied": (
        "qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    ),
    "trainable tokens": (
        "llama", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS}},
    ),
    "trainable tokens, tied": ("qwen2", {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS}),
}  # fmt: skip


def adapted(model: Any, **options: Any) -> Any:
    """The model with adapters that are not 0."""
    torch.manual_seed(7)
    if options.get("ensure_weight_tying") and PEFT < (0, 19):
        pytest.skip("PEFT ties adapters of head and embedding since 0.19")
    if "lm_head" in str(options.get("trainable_token_indices")) and PEFT < (0, 18):
        pytest.skip("PEFT has trainable tokens of a head that is not tied since 0.18")
    options = {"r": 3, "lora_alpha": 16, "init_lora_weights": False, **options}
    adapted_model = peft.get_peft_model(model, peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in adapted_model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return adapted_model.train()


def seeded_step(model: Any, **arguments: Any) -> Step:
    """A step with the same dropout each time."""
    torch.manual_seed(23)
    return step(model, **arguments)


def without_logits(model: Any) -> Step:
    # The adapter of an embedding has the shape of logits.
    has_embedding = any("lora_embedding" in name for name, _ in model.named_parameters())
    with contextlib.nullcontext() if has_embedding else refuse_logits():
        actual = seeded_step(model)
    assert actual.output.logits is None
    return actual


@pytest.mark.parametrize("is_patched_first", [False, True], ids=["peft, patch", "patch, peft"])
@pytest.mark.parametrize(("name", "options"), ADAPTERS.values(), ids=ADAPTERS)
def test_loss_and_every_gradient_are_those_of_the_model(
    name: str, options: dict[str, Any], is_patched_first: bool
) -> None:
    plain = step(tiny_model(name))
    expected = seeded_step(adapted(tiny_model(name), **options))
    assert abs(expected.loss - plain.loss) > 1e-3 * plain.loss
    model = adapted(eaves.hf.patch(tiny_model(name)) if is_patched_first else tiny_model(name), **options)
    if not is_patched_first:
        eaves.hf.patch(model)
    assert_same_step(without_logits(model), expected, FLOAT32_TOLERANCE)
    with_logits = seeded_step(model, skip_logits=False)
    assert torch.equal(with_logits.output.logits, expected.output.logits)
    assert_same_step(with_logits, expected, FLOAT32_TOLERANCE)
    eaves.hf.unpatch(model)
    assert not any(hasattr(type(each), "_eaves_class") for each in model.modules())
    assert_same_step(seeded_step(model), expected, 0)


# 16 bits, against the same numbers in float32: the unpatched model rounds its logits too, and has the same distance.
@pytest.mark.parametrize("is_autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", ["LoRA", "LoRA, tied", "modules_to_save", "trainable tokens, tied"])
def test_in_bfloat16_it_is_as_near_as_the_unpatched_model(name: str, is_autocast: bool) -> None:
    architecture, options = ADAPTERS[name]
    model = adapted(tiny_model(architecture).to(torch.float32 if is_autocast else torch.bfloat16), **options)
    expected = step(copy.deepcopy(model).float())
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        theirs = step(model)
        ours = without_logits(eaves.hf.patch(model))
    assert abs(ours.loss - expected.loss) <= 0.01 * expected.loss
    assert ours.gradients.keys() == expected.gradients.keys()
    for parameter, gradient in expected.gradients.items():
        assert ours.gradients[parameter].dtype == theirs.gradients[parameter].dtype
        limit = max(0.03, 1.5 * distance(theirs.gradients[parameter], gradient))
        assert distance(ours.gradients[parameter], gradient) <= limit, parameter


def test_adapters_are_added_chosen_disabled_and_merged_in_a_patched_model() -> None:
    def made(patch: Callable[[Any], Any]) -> Any:
        model = patch(adapted(tiny_model(), target_modules=["lm_head"]))
        torch.manual_seed(8)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
        return model

    def steps(model: Any, run: Callable[[Any], Step]) -> list[Step]:
        found = [run(model)]
        model.base_model.set_adapter(["default", "other"])
        found.append(run(model))
        model.set_adapter("other")
        found.append(run(model))
        with model.disable_adapter():
            found.append(Step(None, model(**batch()).loss.detach(), {}))
        model.merge_adapter()
        found.append(Step(None, model(**batch()).loss.detach(), {}))
        model.unmerge_adapter()
        return [*found, run(model)]

    expected, actual = steps(made(lambda model: model), step), steps(made(eaves.hf.patch), without_logits)
    assert len({round(each.loss.item(), 4) for each in expected}) == 4  # merged and unmerged models have the same loss
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_step(ours, theirs, FLOAT32_TOLERANCE) if theirs.gradients else torch.testing.assert_close(
            ours.loss, theirs.loss
        )


@pytest.mark.parametrize("name", ["LoRA", "modules_to_save", "trainable tokens"])
def test_the_copy_that_is_active_is_taken_in_each_call(name: str) -> None:
    architecture, options = ADAPTERS[name]
    model = adapted(eaves.hf.patch(tiny_model(architecture)), **options)
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch()).loss, tiny_model(architecture)(**batch()).loss)
    merged_loss = model(**batch()).loss
    merged = model.merge_and_unload()
    assert type(merged.lm_head) is torch.nn.Linear
    torch.testing.assert_close(merged(**batch()).loss, merged_loss)
    with refuse_logits():
        assert merged(**batch()).logits is None
    assert type(eaves.hf.unpatch(merged)) is type(tiny_model(architecture))
    assert type(merged.lm_head) is torch.nn.Linear


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", ["LoRA", "modules_to_save", "trainable tokens, tied"])
def test_a_copy_is_patched_and_has_its_own_parameters(name: str, copied: Callable[[Any], Any]) -> None:
    architecture, options = ADAPTERS[name]
    model = eaves.hf.patch(adapted(tiny_model(architecture), **options))
    expected = without_logits(model)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_step(without_logits(twin), expected, FLOAT32_TOLERANCE)
    eaves.hf.unpatch(twin)
    assert not any(hasattr(type(each), "_eaves_class") for each in twin.modules())


@pytest.mark.parametrize("name", ["LoRA", "modules_to_save", "trainable tokens, tied"])
def test_an_adapter_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    architecture, options = ADAPTERS[name]
    model = eaves.hf.patch(adapted(tiny_model(architecture), **options))
    expected = without_logits(model)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model(architecture), tmp_path, is_trainable=True).train()
    assert_same_step(step(loaded), expected, FLOAT32_TOLERANCE)
    assert_same_step(without_logits(eaves.hf.patch(loaded)), expected, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", ["LoRA", "modules_to_save", "trainable tokens, tied"])
def test_trainer_gives_the_same_losses(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    architecture, options = ADAPTERS[name]

    def losses(model: Any) -> list[float]:
        rows = torch.randint(3, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(1))
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=4, learning_rate=1e-2,
                logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, bf16=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )  # fmt: skip
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses(adapted(tiny_model(architecture), **options))
    assert len(expected) == 4 and len(set(expected)) == 4
    assert losses(eaves.hf.patch(adapted(tiny_model(architecture), **options))) == pytest.approx(expected, rel=0.02)


def test_an_encoder_decoder_that_computes_its_own_loss_has_an_adapter() -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 40, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(3)
    configuration = transformers.T5Config(
        **sizes, dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=False
    )
    model = adapted(transformers.T5ForConditionalGeneration(configuration), target_modules=["lm_head"])
    expected = step(model)
    eaves.hf.patch(model)
    assert_same_step(without_logits(model), expected, FLOAT32_TOLERANCE)
    with_logits = step(model, skip_logits=False)
    assert torch.equal(with_logits.output.logits, expected.output.logits)
    assert_same_step(with_logits, expected, FLOAT32_TOLERANCE)


def test_gradients_are_asked_for_where_something_is_trained() -> None:
    def asked(model: Any) -> int:
        ((_, bits),) = gradients_asked_for(lambda: step(eaves.hf.patch(model)))
        return bits & (OF_HIDDEN | OF_HEAD | OF_BIAS)

    model = adapted(tiny_model(), target_modules=["lm_head", "q_proj"])
    assert asked(model) == OF_HIDDEN | OF_HEAD
    for parameter in model.get_base_model().lm_head.parameters():
        parameter.requires_grad_(False)
    assert asked(model) == OF_HIDDEN


def test_compiled_it_is_one_graph(fresh_compiler: None) -> None:
    model = adapted(tiny_model(), target_modules=["lm_head"])
    expected = step(model)
    compiled = torch.compile(eaves.hf.patch(model), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        model.zero_grad()
        output = compiled(**batch())
        output.loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert output.logits is None
        assert_same_step(Step(output, output.loss.detach(), gradients), expected, FLOAT32_TOLERANCE)


def test_a_compiled_model_may_have_got_its_adapter_after_patch(fresh_compiler: None) -> None:
    model = adapted(eaves.hf.patch(tiny_model()), target_modules=["lm_head"])
    expected = adapted(tiny_model(), target_modules=["lm_head"])(**batch())
    with pytest.raises(Exception, match=r"replaced after patch; call patch again"):
        torch.compile(model, backend="eager", fullgraph=True)(**batch())
    if torch.__version__.startswith("2.11."):
        pytest.skip("torch.compile of PyTorch 2.11 fails in an assertion of its own after this error")
    output = torch.compile(model, backend="eager")(**batch())
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss)


@pytest.mark.parametrize("module", ["lm_head", "lm_head.base_layer", "lm_head.lora_B.default"])
def test_a_hook_that_looks_for_a_tensor_gets_one(module: str) -> None:
    model = adapted(tiny_model(), target_modules=["lm_head"])
    hook: Callable[..., Any] = lambda module, _, output: output / 2 if isinstance(output, Tensor) else None  # noqa: E731
    model.get_base_model().get_submodule(module).register_forward_hook(hook)
    expected = step(model)
    eaves.hf.patch(model)
    with pytest.warns(UserWarning, match=r"\(a hook of the head\), so eaves computes all logits"):
        actual = step(model)
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", ["LoRA", "modules_to_save", "trainable tokens"])
def test_distillation_reads_the_heads_of_adapters(name: str) -> None:
    architecture, options = ADAPTERS[name]
    model = adapted(tiny_model(architecture), **options)
    tokens = batch()["input_ids"]
    expected = model(tokens).logits
    with deferred(model.get_base_model().lm_head):
        logits = model(tokens).logits
    assert isinstance(logits, DeferredLogits) and logits.is_deferred
    torch.testing.assert_close(
        torch.nn.functional.linear(logits.hidden, logits.head.weight, logits.head.bias), expected
    )
    with pytest.warns(UserWarning, match="so eaves computes all logits"):
        assert torch.equal(logits.tensor("a test"), expected)


# Operations on a product z. The KNOWN ones give a sum of products, the UNKNOWN ones compute a tensor.
KNOWN: dict[str, Callable[[Any], Any]] = {
    "a factor": lambda z: 0.5 * z * 3,
    "a sum": lambda z: z * 2 + z * 0.25,
    "a dtype": lambda z: z.to(torch.float32),
}
UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda z: z + torch.linspace(0, 1, VOCABULARY),
    "a tensor in front": lambda z: torch.linspace(0, 1, VOCABULARY) * z,
    "a tensor's factor": lambda z: z * torch.linspace(0, 1, VOCABULARY),
    "a function": lambda z: torch.tanh(z * 2),
    "a method": lambda z: (z + z).clamp(max=0.5),
}


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_arithmetic_of_an_adapter_is_noted_or_done(name: str) -> None:
    head = adapted(tiny_model(), target_modules=["lm_head"]).get_base_model().lm_head
    hidden = torch.randn(3, 32)

    def forward(x: Tensor) -> Any:
        return {**KNOWN, **UNKNOWN}[name](torch.nn.functional.linear(x, head.base_layer.weight))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = logits_of_adapter(head, forward, hidden)
    assert bool(caught) == (name in UNKNOWN) == isinstance(logits, Tensor)
    if isinstance(logits, DeferredLogits):
        logits = torch.nn.functional.linear(logits.hidden, logits.head.weight)
    torch.testing.assert_close(logits, forward(hidden))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "DoRA": (
        lambda: adapted(tiny_model(), target_modules=["lm_head"], use_dora=True),
        r"the adapter 'default' on the head of this LlamaForCausalLM is a variant of LoRA \(DoRA",
    ),
    "another adapter": (
        lambda: peft.get_peft_model(tiny_model(), peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])),
        r"is a peft\.tuners\.ia3\.layer\.Linear, expected a torch\.nn\.Linear, alone or in LoRA",
    ),
    "an adapter around another module": (
        lambda: adapted(
            _with_head(torch.nn.modules.linear.NonDynamicallyQuantizableLinear), target_modules=["lm_head"]
        ),
        r"is a torch\.nn\.modules\.linear\.NonDynamically\w+, expected a torch\.nn\.Linear",
    ),
}


def _with_head(kind: Any) -> Any:
    model = tiny_model()
    model.lm_head.__class__ = kind
    return model


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_is_refused_by_patch_and_by_a_call(make: Callable[[], Any], message: str) -> None:
    model = make()
    with pytest.raises(NotImplementedError, match=message):
        eaves.hf.patch(model)
    patched = eaves.hf.patch(tiny_model())
    patched.lm_head = model.get_base_model().lm_head
    with pytest.raises(NotImplementedError, match=message):
        patched(**batch())


def test_a_variant_that_is_added_to_a_patched_model_is_refused() -> None:
    model = eaves.hf.patch(adapted(tiny_model(), target_modules=["lm_head"]))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"], use_dora=True))
    with pytest.raises(NotImplementedError, match=r"the adapter 'other' .* is a variant of LoRA"):
        model(**batch())


def test_a_head_over_ranks_has_no_adapter(process_group: None) -> None:
    model = adapted(tiny_model(), target_modules=["lm_head"])
    with pytest.raises(NotImplementedError, match=r"in pieces over ranks and has an adapter of PEFT"):
        eaves.hf.patch(model, group=torch.distributed.group.WORLD)


@pytest.mark.parametrize("name", ["LoRA", "modules_to_save"])
@pytest.mark.parametrize("has_own_group", [True, False])
def test_fully_shard_takes_a_patched_model(name: str, has_own_group: bool, process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    architecture, options = ADAPTERS[name]
    model = adapted(tiny_model(architecture), **options)
    expected = step(model)
    eaves.hf.patch(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for module in [model.get_base_model().lm_head, model][not has_own_group :]:
        fully_shard(module, mesh=mesh)
    for _ in range(2):
        actual = step(model)
        gradients = {name: gradient.full_tensor() for name, gradient in actual.gradients.items()}
        assert actual.output.logits is None
        assert_same_step(actual._replace(gradients=gradients), expected, FLOAT32_TOLERANCE)
    with pytest.raises(NotImplementedError, match=r"in pieces over ranks and has an adapter|FSDP"):
        model = adapted(tiny_model(architecture), **options)
        fully_shard(model.get_base_model().lm_head, mesh=mesh)
        eaves.hf.patch(model)


def test_an_adapter_that_fully_shard_has_cut_by_itself_gives_logits(process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = adapted(tiny_model(), target_modules=["lm_head"])
    expected = step(model)
    eaves.hf.patch(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for module in ("lora_A", "lora_B"):
        fully_shard(model.get_base_model().lm_head.get_submodule(f"{module}.default"), mesh=mesh)
    with pytest.warns(UserWarning, match="so eaves computes all logits"):
        actual = step(model)
    gradients = {name: gradient.full_tensor() for name, gradient in actual.gradients.items()}
    assert_same_step(actual._replace(gradients=gradients), expected, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", ["LoRA", "modules_to_save"])
def test_a_model_that_was_merged_is_unpatched(name: str) -> None:
    architecture, options = ADAPTERS[name]
    merged = adapted(eaves.hf.patch(tiny_model(architecture)), **options).merge_and_unload()
    eaves.hf.unpatch(merged)
    assert not any(hasattr(type(each), "_eaves_class") for each in merged.modules())


def test_a_batch_of_several_adapters_gives_logits() -> None:
    def step_of(patch: Callable[[Any], Any]) -> Step:
        model = adapted(patch(tiny_model()), target_modules=["lm_head"]).eval()
        return step(model, adapter_names=["default", "__base__"], **options)

    options: dict[str, Any] = {}
    expected = step_of(lambda model: model)
    options["skip_logits"] = True
    with pytest.warns(UserWarning, match=r"\(adapter_names\), so eaves computes all logits"):
        actual = step_of(eaves.hf.patch)
    assert_same_step(actual, expected, FLOAT32_TOLERANCE)
