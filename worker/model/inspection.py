"""What a family that no test of ours knows does beside its configuration, seen by running it.

Without weights: the module is made on torch's meta device, a few tokens go through it, and each
layer must ask the attention interface exactly once for what a page can give: keys and values of one
shape, causal in the configured window, at the positions that are given. With weights: what a token
becomes must not depend on its neighbours but through attention. So a family is refused for what it
does, not for a name that we have never heard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from typing_extensions import override

from worker.model.attention import AttentionStep, Target
from worker.model.errors import AttentionInputError, ModelLoadError
from worker.model.families import ModelFacts
from worker.model.pageable import SERVED

INSPECTED: Final = "pageferry_inspected"
INSPECTED_TOKENS: Final = 1 << 15
"""Without weights they cost nothing, and short sequences may be attended over in another way."""
TOKENS: Final = 3
FIRST_POSITION: Final = 5
"""Of the tokens that go through a loaded module."""

COMPUTED: Final = frozenset({"scaling", "softcap", "s_aux", "sliding_window", "dropout"})
"""What an attention module may ask for. Windows are seen by their masks."""
POINTLESS: Final = frozenset({"position_ids", "is_causal", "cache_position"})
"""What some modules hand on that changes nothing here."""

RELATIVE_DIFFERENCE: Final = 0.3
"""Of the logits' spread: more than rounding does in any type, which may choose another expert, and
less than a token seen.
"""

Visible = Callable[..., torch.Tensor]
"""transformers' mask function: of batch, head, query and key indices."""


class AskedMask(torch.Tensor):
    """A mask that a module asked for; nothing that is computed from it is one."""

    visible: Visible
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asked for."""

    layer: int
    kv_heads: int
    heads: int
    key_dim: int
    value_dim: int
    visible: Visible | None
    """None: it brought a mask of its own, or none."""
    sinks: bool
    unknown: tuple[str, ...]
    """Names of arguments that paged attention does not compute."""


@dataclass(frozen=True)
class Recorder:
    """Handed to a module as a step is."""

    calls: list[AttentionCall]


def inspect_family(config: Any, facts: ModelFacts) -> ModelFacts:
    """Run a model's family without weights; gives the facts with what only the module knows.

    Raises:
        ModelLoadError: it asks for something that pages cannot give, or cannot be run so.
    """
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if kind._is_stateful:
        raise _refused(facts, "its layers carry a state from token to token")
    recorder = Recorder([])
    try:
        follows_positions, shape = _run(config, recorder)
    except (
        AssertionError,
        AttributeError,
        ImportError,
        IndexError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = f"its module cannot be run without weights: {error}"
        if not kind._supports_attention_backend:
            reason = "its attention does not go through transformers' attention interface"
        raise _refused(facts, reason) from error
    reasons = [*_layer_reasons(recorder.calls, facts)]
    if not follows_positions:
        reasons.append("it does not rotate by the positions that it is given")
    if shape != (1, 1, facts.vocab_size):
        reasons.append(f"expected logits of {facts.vocab_size} tokens for one row, got {shape}")
    if reasons:
        raise _refused(facts, "; ".join(reasons[:3]))
    return replace(facts, head_sinks=any(call.sinks for call in recorder.calls))


def _run(config: Any, recorder: Recorder) -> tuple[bool, tuple[int, ...]]:
    """Whether rotary modules got our positions, and the shape of the logits."""
    with torch.device("meta"), torch.inference_mode():
        module = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=INSPECTED, dtype=torch.bfloat16
        ).eval()
        if module._can_set_experts_implementation():
            # The others look at which experts were chosen, which a meta tensor does not say.
            module.set_experts_implementation("batched_mm")
        tokens = torch.zeros(1, INSPECTED_TOKENS, dtype=torch.long)
        positions = torch.zeros_like(tokens)
        seen = _positions_seen(module, positions)
        found = module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=torch.ones_like(tokens),
            logits_to_keep=torch.zeros(1, dtype=torch.long),
            use_cache=False,
            inspected=recorder,
        )
    return any(seen), tuple(found.logits.shape)


def _positions_seen(module: nn.Module, positions: torch.Tensor) -> list[bool]:
    """Grows with each call of a rotary module: whether it got these positions."""
    seen: list[bool] = []

    def look(_module: nn.Module, given: Sequence[Any], named: dict[str, Any]) -> None:
        seen.append(any(one is positions for one in (*given, *named.values())))

    for part in module.modules():
        if any(name.endswith("inv_freq") for name, _ in part.named_buffers(recurse=False)):
            part.register_forward_pre_hook(look, with_kwargs=True)
    return seen


def _layer_reasons(calls: Sequence[AttentionCall], facts: ModelFacts) -> Sequence[str]:
    layers = [call.layer for call in calls]
    if layers != list(range(facts.num_layers)):
        silent = sorted(set(range(facts.num_layers)) - set(layers))
        what = (
            f"layers {', '.join(map(str, silent[:8]))} ask for none"
            if silent
            else (f"it is asked {len(calls)} times")
        )
        return [f"expected attention once in each of {facts.num_layers} layers, {what}"]
    return [reason for call in calls for reason in _call_reasons(call, facts)]


def _call_reasons(call: AttentionCall, facts: ModelFacts) -> Sequence[str]:
    where = f"layer {call.layer}"
    if call.unknown:
        return [f"{where} asks attention for {', '.join(call.unknown)}"]
    expected = (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim)
    found = (call.heads, call.kv_heads, call.key_dim, call.value_dim)
    if found != expected:
        return [
            f"{where}: expected {expected[0]} heads and {expected[1]} kv heads of {expected[2]} by "
            f"the configuration, got {found[0]} and {found[1]}, keys of {found[2]} and values of "
            f"{found[3]}"
        ]
    window = facts.windows[call.layer]
    if call.visible is None or not _sees(call.visible, window, facts.max_position_tokens):
        return [f"{where} does not see the tokens before it{f', {window} at most' * bool(window)}"]
    return []


def _sees(visible: Visible, window: int | None, longest: int) -> bool:
    """Whether the mask function is causal within the window, at places that tell."""
    edges = {0, 1, 2, 7, 100, longest - 1}
    if window is not None:
        edges |= {window - 1, window, window + 1, 2 * window, 3 * window + 5}
    places = torch.tensor(sorted(edges))
    query, key = places[:, None], places[None, :]
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    nothing = torch.zeros((), dtype=torch.long)
    try:
        found = visible(nothing, nothing, query, key)
        return torch.equal(found.expand(expected.shape).bool(), expected)
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False


def _asked_mask(q_length: int, kv_length: int, mask_function: Visible, **_: Any) -> AskedMask:
    """In place of a mask: what would be in it."""
    mask = torch.empty(1, 1, q_length, kv_length, device="meta").as_subclass(AskedMask)
    mask.visible = mask_function
    return mask


def _inspected(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    inspected: Recorder,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """In place of attention: what is asked for."""
    index: int = module.layer_idx  # type: ignore[assignment]  # every attention module has one
    inspected.calls.append(
        AttentionCall(
            layer=index,
            kv_heads=key.shape[1],
            heads=query.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            visible=attention_mask.visible if isinstance(attention_mask, AskedMask) else None,
            sinks=asked.get("s_aux") is not None,
            unknown=tuple(sorted(name for name, given in asked.items() if _unknown(name, given))),
        )
    )
    rows, heads, tokens = query.shape[:3]
    return query.new_empty(rows, tokens, heads, value.shape[3]), None


def _unknown(name: str, given: object) -> bool:
    return name not in COMPUTED | POINTLESS and given is not None and given is not False


AttentionInterface.register(INSPECTED, _inspected)
AttentionMaskInterface.register(INSPECTED, _asked_mask)


class OwnValues(AttentionStep):
    """A step in which every token sees itself alone, and nothing is stored."""

    @override
    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key_value: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        values = key_value[:, 1]
        return values.repeat_interleave(query.shape[1] // values.shape[1], 1)

    @override
    def target(self, index: int) -> Target:
        raise AttentionInputError("expected no store: this step has no pages")

    @override
    def attend_stored(
        self, index: int, query: torch.Tensor, key_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return self.attend(index, query, key_value, scale)

    @override
    def of_drawn(self) -> OwnValues:
        return self


@torch.inference_mode()
def check_tokens_alone(module: Any, facts: ModelFacts) -> None:
    """Run a loaded module with attention in which every token sees itself alone.

    Raises:
        ModelLoadError: a token's logits depend on its neighbours all the same, or on where it lies
            in the batch.
    """
    ids = torch.arange(1, TOKENS + 1) % facts.vocab_size
    positions = torch.arange(FIRST_POSITION, FIRST_POSITION + TOKENS)
    together = _last_logits(module, ids, positions)
    alone = _last_logits(module, ids[-1:], positions[-1:])
    spread = float(alone.std())
    worst = float((together - alone).abs().max())
    if not worst <= RELATIVE_DIFFERENCE * spread:
        raise _refused(
            facts,
            "its tokens see each other beside attention, or do not keep their positions (logits "
            f"with a spread of {spread:.3g} differ by {worst:.3g})",
        )


def _last_logits(module: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    device = module.device
    found: torch.Tensor = module(
        input_ids=ids[None].to(device),
        position_ids=positions[None].to(device),
        logits_to_keep=torch.tensor([len(ids) - 1], device=device),
        use_cache=False,
        paged=OwnValues(),
    ).logits[0, 0]
    return found.float()


def _refused(facts: ModelFacts, reason: str) -> ModelLoadError:
    return ModelLoadError(f"model family {facts.family!r} is not supported: {reason}; {SERVED}")
