"""What a training run is made of, and what it will cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvkeep.learn.config import KVpopConfig, LearnError, ModelShape
from kvkeep.policies.online import Geometry

Objective = Literal["boundary", "regression"]
OBJECTIVES: tuple[Objective, ...] = ("boundary", "regression")
Control = Literal["streaming-llm", "dense"]
CONTROLS: tuple[Control, ...] = ("streaming-llm", "dense")


@dataclass(frozen=True)
class TrainSettings:
    """How scorers are trained on a frozen model.

    The paper trains for 2,000 steps of 128 sequences of 16,384 tokens, with AdamW (0.9, 0.95), weight decay 1e-4, clip
    1, 100 steps of warm-up, and a cosine from 1e-3 to 8e-5 (KVpop, arXiv 2607.05061, table 3). Length, sequences and
    batch are smaller here, to suit two cores; the number of pairs it does not give.

    Attributes:
        config: geometry, decay, scorer.
        length: S, tokens of a sequence.
        sequences: in all; texts come again where there are fewer.
        batch: sequences of one optimizer step.
        objective: `boundary`, the paper's pairwise loss; or `regression`, the squared error of the score against the
            target, in standard deviations of the target of its cell, as a control.
        pairs: queries that are sampled of each sequence, for `boundary`.
        learning_rate: at its highest.
        final_learning_rate: at the end of the cosine.
        warm_up: steps up to it; at most a tenth of all.
        weight_decay: of AdamW.
        clip: highest norm of the gradient.
        statistics: sequences whose inputs are standardised by, before the first step.
        evaluate_every: steps between looks at held-out texts.
        heldout: held-out texts.
        divergence: of those, texts that are read under the cache itself, for KL; at each look.
        checkpoint_every: steps.
        seed: of the order of texts and of sampled queries.
    """

    config: KVpopConfig
    length: int = 2048
    sequences: int = 256
    batch: int = 1
    objective: Objective = "boundary"
    pairs: int = 256
    learning_rate: float = 1e-3
    final_learning_rate: float = 8e-5
    warm_up: int = 100
    weight_decay: float = 1e-4
    clip: float = 1.0
    statistics: int = 4
    evaluate_every: int = 32
    heldout: int = 4
    divergence: int = 1
    checkpoint_every: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise LearnError(
                expected=f"one of {', '.join(OBJECTIVES)}", received=f"{self.objective!r}", remedy="correct it"
            )
        least = {"length": 2, "sequences": 1, "batch": 1, "pairs": 1, "statistics": 1, "evaluate_every": 1}
        least |= {"heldout": 1, "divergence": 0, "checkpoint_every": 1, "warm_up": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise LearnError(
                    expected=f"{name} of at least {lowest}", received=f"{getattr(self, name)}", remedy=f"correct {name}"
                )
        if not (self.learning_rate > 0 and self.final_learning_rate >= 0 and self.clip > 0 and self.weight_decay >= 0):
            raise LearnError(
                expected="a learning rate and a clip above 0, no negative weight decay or final rate",
                received=f"{self.learning_rate}, {self.clip}, {self.weight_decay}, {self.final_learning_rate}",
                remedy="1e-3, 1.0, 1e-4 and 8e-5 are usual",
            )

    @property
    def steps(self) -> int:
        """Optimizer steps, the last of which may have fewer sequences."""
        return -(-self.sequences // self.batch)

    @property
    def warm_up_steps(self) -> int:
        """Steps up to the highest learning rate."""
        return max(1, min(self.warm_up, self.steps // 10))

    def geometry(self, shape: ModelShape, itemsize: int) -> Geometry:
        """How cells spend their cap in training.

        Raises:
            LearnError: a budget without room for a slot, or sequences that fit into it.
        """
        found = self.config.geometry(shape.head_size, itemsize)
        if self.length <= found.held:
            raise LearnError(
                expected=f"sequences of more than {found.held} tokens, which a full cell holds",
                received=f"{self.length}",
                remedy="a larger --length or fewer --entries: where nothing must leave there is nothing to learn",
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {**asdict(self), "config": self.config.to_dict()}


@dataclass(frozen=True)
class FinetuneSettings:
    """How a model is trained together with its scorers.

    The paper's: KL over the 256 largest logits of the dense teacher, temperature 1, weight 1 beside the scorers' loss;
    all weights at a constant rate of 8e-5, clip 1 (KVpop, arXiv 2607.05061, table 3). Ours: the two norms are clipped
    apart, so that what is learned from one loss does not hang on the size of the other.

    Attributes:
        scorers: how scorers are trained, and everything that both have in common.
        control: None trains scorers and model. `streaming-llm` trains the model alone, under sinks and the newest
            entries; `dense` does so with nothing evicted: its KL begins at zero, so that it learns from `text_loss`.
        lora_rank: of adapters at all linear layers but the head, which are trained in the place of the weights; None
            trains all weights.
        learning_rate: of the model, the same at every step.
        top: K, logits of the teacher that are compared.
        text_loss: weight of the negative log-likelihood of the text beside the KL; the paper has none.
        recompute: whether layers are computed again for their gradients, which saves memory and costs time.
    """

    scorers: TrainSettings
    control: Control | None = None
    lora_rank: int | None = None
    learning_rate: float = 8e-5
    top: int = 256
    text_loss: float = 0.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.control is not None and self.control not in CONTROLS:
            raise LearnError(
                expected=f"one of {', '.join(CONTROLS)}, or None", received=f"{self.control!r}", remedy="correct it"
            )
        scorer = self.scorers.config.scorer
        if (scorer == "zero") != (self.control is not None):
            raise LearnError(
                expected="a scorer that learns, or a control and the scorer 'zero'",
                received=f"scorer {scorer!r}, control {self.control!r}",
                remedy="control='streaming-llm' is what a model with scorers is compared with",
            )
        for name, lowest in {"lora_rank": 1, "top": 1}.items():
            if (value := getattr(self, name)) is not None and value < lowest:
                raise LearnError(expected=f"{name} of at least {lowest}", received=f"{value}", remedy=f"correct {name}")
        if not (self.learning_rate > 0 and self.text_loss >= 0):
            raise LearnError(
                expected="a learning rate above 0 and a text loss of at least 0",
                received=f"{self.learning_rate}, {self.text_loss}",
                remedy="8e-5 and 0 are the paper's",
            )
        if self.control == "dense" and not self.text_loss:
            raise LearnError(
                expected="a text loss above 0 for the dense control",
                received="0: the model would be compared with itself, and learn nothing",
                remedy="text_loss=1, in the runs that it is compared with, too",
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it, without what `scorers` says."""
        return {name: value for name, value in asdict(self).items() if name != "scorers"}


@dataclass(frozen=True)
class Cost:
    """What a run will take, beside the model itself.

    Attributes:
        parameters: numbers that are trained.
        training_bytes: gradients and the optimizer's two moments, and the parameters where they are not the model's.
        layer_bytes: queries, keys, values and inputs of one layer of one sequence.
        seconds: of the whole run, from sequences that were timed; looks at held-out texts included.
        teacher_bytes: of the second model, that is not trained.
        graph_bytes: what one sequence keeps for the model's gradient, as it was counted.
    """

    parameters: int
    training_bytes: int
    layer_bytes: int
    seconds: float
    teacher_bytes: int = 0
    graph_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.training_bytes + self.layer_bytes + self.teacher_bytes + self.graph_bytes

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)
