"""Routings drawn from a named distribution, the same on every machine and for every batch size.

Skew is what an ablation varies, so a label must mean one thing: `hot:4:0.4` gives four experts 40 % of the routes
also when a token's experts must differ, and a token's routes do not change when more tokens follow it.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from mok.errors import CapabilityError, InputError, require
from mok.routing.recorded import load
from mok.routing.routers import sigmoid_weights, softmax_weights
from mok.routing.types import Routing
from mok.workload import RoutingSpec

# Tokens are drawn in whole blocks of about this many entries (tokens x experts) and cropped: every operation then sees
# the same shapes whatever num_tokens is, so vectorisation cannot change a bit of an earlier token, and memory is bounded.
_BLOCK_ENTRIES = 1 << 18
# The part of popularity that shows in the weights, in nats. A chosen unpopular expert keeps a weight that BF16 sums
# still see, however skewed the choice is.
_MAX_WEIGHT_GAP = 4.0
_MIN_LOG_P = -600.0


def generate(
    spec: RoutingSpec,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Routing:
    """`num_tokens` tokens with `top_k` distinct experts each, drawn as `spec` says.

    A token's experts are the top-k of log p + Gumbel noise, which is drawing from p without replacement (Efraimidis
    and Spirakis 2006; Kool et al. 2019, arXiv 1903.06059). p over experts:
      uniform       1/E.
      zipf:S        proportional to 1/rank^S; which expert has which rank is a permutation drawn from `seed`. With
                    top_k > 1 the load is flatter than p at the top, since one token takes an expert only once.
      hot:N:SHARE   N experts (drawn from `seed`) receive SHARE of all *routes*, whatever top_k: p is solved for it.
      dirichlet:A   p ~ Dirichlet(A, ..., A), drawn once from `seed`.
      file          a recording (`step` default: the last; `layer` default: the first), tokens repeated or cropped to
                    `num_tokens`, with its recorded weights; `seed` and `router` play no part.
    Weights (float32, sum 1 per token) come from the chosen experts' logits, noise + log p with the latter cut to the
    top 4 nats: softmax over them (router "softmax") or their normalised sigmoids ("sigmoid_group").
    Drawn on the CPU with a torch.Generator, then moved to `device`. The first n tokens do not depend on num_tokens.
    Raises InputError: counts out of range, a hot share that distinct experts cannot reach, a recording of another E
    or K; CapabilityError: a CUDA device that is not there.
    """
    _require_int("num_tokens", num_tokens, 0)
    _require_int("num_experts", num_experts, 1)
    _require_int("seed", seed, 0)
    _require_int("top_k", top_k, 1)
    require(top_k <= num_experts, f"top_k={top_k} exceeds num_experts={num_experts}; a token's experts are distinct.")
    target = _device(device)
    if spec.kind == "file":
        routing = _recorded(spec, num_tokens, num_experts, top_k)
    else:
        routing = _drawn(spec, num_tokens, num_experts, top_k, seed)
    return Routing(routing.top_experts.to(target), routing.weights.to(target))


def log_probabilities(spec: RoutingSpec, num_experts: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """log p of the first draw, up to a constant, float64 [E] with maximum 0 (natural log). See `generate`."""
    order = torch.randperm(num_experts, generator=generator)
    log_p = torch.zeros(num_experts, dtype=torch.float64)
    if spec.kind == "zipf":
        log_p[order] = -spec.values[0] * torch.arange(1, num_experts + 1, dtype=torch.float64).log()
    elif spec.kind == "hot":
        num_hot = int(spec.values[0])
        log_p[order[:num_hot]] = _hot_log_odds(num_hot, spec.values[1], num_experts, top_k)
    elif spec.kind == "dirichlet":
        # Gamma(a) = Gamma(a + 1) * U^(1/a) (Marsaglia and Tsang 2000): in logs, so that a small alpha cannot underflow.
        alpha = torch.full((num_experts,), spec.values[0], dtype=torch.float64)
        gamma = torch._standard_gamma(alpha + 1, generator=generator)
        log_p = gamma.log() + _uniform((num_experts,), generator).log() / alpha
    return (log_p - log_p.max()).clamp_min(_MIN_LOG_P)


def _drawn(spec: RoutingSpec, num_tokens: int, num_experts: int, top_k: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    log_p = log_probabilities(spec, num_experts, top_k, generator)
    p = log_p.exp()
    weights_of = sigmoid_weights if spec.router == "sigmoid_group" else softmax_weights
    ids, weights = [torch.empty(0, top_k, dtype=torch.int64)], [torch.empty(0, top_k)]
    block = max(16, _BLOCK_ENTRIES // num_experts)
    for _ in range(-(-num_tokens // block)):
        # log(u) / p orders as log p + Gumbel does and needs one logarithm per entry.
        race = _uniform((block, num_experts), generator).log_()
        chosen = torch.topk(race / p, top_k, dim=1).indices
        noise = -torch.log(-race.gather(1, chosen))
        logits = log_p[chosen].clamp_min(-_MAX_WEIGHT_GAP) + noise
        ids.append(chosen)
        weights.append(weights_of(logits.float()))
    return Routing(torch.cat(ids)[:num_tokens].contiguous(), torch.cat(weights)[:num_tokens].contiguous())


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniform in [2^-54, 1 - 2^-54], float64: torch's [0, 1) in steps of 2^-53, moved off 0 so that logarithms stay finite."""
    return torch.rand(shape, dtype=torch.float64, generator=generator).mul_(1 - 2.0**-53).add_(2.0**-54)


def _hot_log_odds(num_hot: int, share: float, num_experts: int, top_k: int) -> float:
    """log(p_hot / p_cold) at which `num_hot` experts get `share` of the routes of tokens with distinct experts."""
    require(num_hot <= num_experts, f"routing 'hot:{num_hot}:...' names more experts than num_experts={num_experts}.")
    least = max(0.0, 1 - (num_experts - num_hot) / top_k)
    most = min(1.0, num_hot / top_k)
    remedy = f"{math.ceil(share * top_k)} or more hot experts" if share > most else "fewer hot experts"
    require(
        least - 1e-6 <= share <= most + 1e-6,
        f"routing 'hot:{num_hot}:{share:g}' cannot be: with top_k={top_k} distinct experts per token, {num_hot} of "
        f"{num_experts} experts get between {least:g} and {most:g} of the routes. Use 'hot:{num_hot}:"
        f"{most if share > most else least:g}' or {remedy}.",
    )
    low, high = -42.0, 42.0  # past +-42 nats the choice is certain at 2^-54 resolution
    for _ in range(60):
        middle = (low + high) / 2
        if _mean_hot(math.exp(middle), num_hot, num_experts, top_k) < share * top_k:
            low = middle
        else:
            high = middle
    return high


def _mean_hot(odds: float, num_hot: int, num_experts: int, top_k: int) -> float:
    """Mean hot experts among `top_k` drawn without replacement: Wallenius' noncentral hypergeometric mean, draw by draw."""
    probability = np.zeros(top_k + 1)  # probability[h]: h hot experts drawn so far
    probability[0] = 1.0
    for drawn in range(top_k):
        hot = np.arange(top_k + 1)
        left_hot = np.clip(num_hot - hot, 0, None) * odds
        left_cold = np.clip(num_experts - num_hot - (drawn - hot), 0, None)
        total = left_hot + left_cold
        next_hot = np.divide(left_hot, total, out=np.zeros_like(total), where=total > 0)
        moved = probability * next_hot
        probability = probability - moved
        probability[1:] += moved[:-1]
    return float(probability @ np.arange(top_k + 1))


def _recorded(spec: RoutingSpec, num_tokens: int, num_experts: int, top_k: int) -> Routing:
    assert spec.path is not None  # RoutingSpec's own rule
    recording = load(spec.path)
    require(
        (recording.num_experts, recording.top_k) == (num_experts, top_k),
        f"{spec.path} records {recording.num_experts} experts with top_k {recording.top_k}, but the shape has "
        f"{num_experts} with top_k {top_k}; use a shape with the recording's sizes.",
    )
    routing = recording.routing(spec.step, spec.layer)
    rows = torch.arange(num_tokens) % routing.num_tokens
    return Routing(routing.top_experts[rows], routing.weights[rows])


def repetition(spec: RoutingSpec, num_tokens: int) -> str | None:
    """What a reader must know when `generate` repeats a recording shorter than `num_tokens`; None when it does not.

    Reads the recording again. Raises InputError as `generate` does.
    """
    if spec.path is None:
        return None
    recorded = load(spec.path).routing(spec.step, spec.layer).num_tokens
    return f"routing: {recorded} recorded tokens, repeated to {num_tokens}" if recorded < num_tokens else None


def _require_int(name: str, value: int, least: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63
    require(ok, f"{name} must be an int >= {least}, got {value!r}.")


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {device!r}; use 'cpu' or 'cuda'. ({error})") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise CapabilityError(
            f"device {device!r} asked for, but torch sees no CUDA device; use device='cpu' or see `mok doctor`."
        )
    return target
