"""Local training once more, as anybody would write it down in plain PyTorch: float64, one example at a time, no
stacking, no padding, no caches. The tests hold fedloom's client against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.data.tokenize import Encoded
from fedloom.types import AdapterSpec, Tensors, Training
from small_world import small_llama


class StraightLoop:
    """A mixture of LoRA experts on the small backbone, and one AdamW that lives as long as this object.

    Args:
        tensors: adapter and router by flat name.
        spec: rank, alpha, experts.
        training: rates, clipping, decay.
        trainable: which names are trained.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        spec: AdapterSpec,
        training: Training,
        trainable: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.spec, self.training = spec, training
        self.model = small_llama().double()
        self.gates = torch.ones(spec.experts, dtype=torch.float64)
        self.values = {n: t.double().clone().requires_grad_(trainable(n)) for n, t in tensors.items()}
        for path, module in self.model.named_modules():
            if path.endswith(spec.targets):
                module.register_forward_hook(self._hook(path))
        trained = {n: t for n, t in self.values.items() if t.requires_grad}
        groups = [
            {"params": [t for n, t in trained.items() if n.startswith("experts/")], "lr": training.lr},
            {"params": [t for n, t in trained.items() if n.startswith("router/")], "lr": training.router_lr},
        ]
        self.trained = list(trained.values())
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], weight_decay=training.weight_decay, foreach=False
        )
        self.norms: list[float] = []

    def _hook(self, path: str) -> Callable[..., Tensor]:
        def add_experts(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            for m in range(self.spec.experts):
                A, B = self.values[f"experts/{m}/{path}.lora_A"], self.values[f"experts/{m}/{path}.lora_B"]
                output = output + self.spec.alpha / self.spec.rank * self.gates[m] * (inputs[0] @ A.T @ B.T)
            return output

        return add_experts

    def loss(self, example: Encoded, feature: Tensor) -> Tensor:
        """Return the negative log-likelihood of every response token, (labels,)."""
        if "router/0.weight" in self.values:
            w = self.values
            hidden = w["router/0.weight"] @ feature.double() + w["router/0.bias"]
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))  # GELU
            self.gates = (w["router/2.weight"] @ hidden + w["router/2.bias"]).softmax(0)
        ids = torch.tensor([example.ids])
        log_p = self.model(input_ids=ids).logits[0].log_softmax(-1)
        labels = range(example.prompt_length, len(example.ids))
        return -torch.stack([log_p[t - 1, example.ids[t]] for t in labels])

    def step(self, batch: Sequence[Encoded], features: Sequence[Tensor]) -> float:
        """Take one step on the mean over all response tokens of the batch; return that mean."""
        self.optimizer.zero_grad()
        loss = torch.cat([self.loss(e, f) for e, f in zip(batch, features, strict=True)]).mean()
        loss.backward()
        norm = math.sqrt(sum(float((t.grad**2).sum()) for t in self.trained if t.grad is not None))
        self.norms.append(norm)
        if self.training.clip:
            for t in self.trained:
                if t.grad is not None:
                    t.grad *= min(1.0, self.training.clip / (norm + 1e-6))
        self.optimizer.step()
        return loss.item()

    def set(self, tensors: Tensors) -> None:
        """Begin the next round from the server's tensors; the optimiser goes on."""
        with torch.no_grad():
            for name, value in self.values.items():
                value.copy_(tensors[name])

    def read(self) -> Tensors:
        return {name: t.detach().clone() for name, t in self.values.items()}


def largest_difference(a: Tensors, b: Tensors) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
