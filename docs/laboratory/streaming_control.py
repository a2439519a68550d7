"""The control of Speculative Streaming's joint training: a LoRA alone, with the same places, rank, texts and steps.

    python docs/laboratory/streaming_control.py --target smollm2 --data FILE --answers given --mode tuned --output DIR

Options are those of `hf-specdec train streaming`. The folder holds streams that know nothing and tune the target all
the same: `streaming_table.py --lora DIR` scores its text.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_specdec.commands.options import command
from hf_specdec.target.masks import as_bias
from hf_specdec.train.learning import examining, train
from hf_specdec.train.lessons import batches
from hf_specdec.train.streaming import StreamingSettings, StreamingTraining
from hf_specdec.train.streaming.learner import Learner, MainStream, StreamTrainer


class MainLearner(Learner):
    """The tuned main stream alone."""

    def forward(self, batch: dict[str, Tensor]) -> tuple[Any, None, Tensor]:
        (upper, windows), at, main = self._target, batch["at"], batch["states"]
        rows, width = main.shape[:2]
        places = torch.arange(width)
        distance = (places[:, None] - places)[None]
        mask = as_bias(distance >= 0, distance, windows, main.dtype)
        with self.streams.beside(upper, 0, width, turns=False):
            behind = upper.run(main, mask, places[None], MainStream())
        return None, None, upper.head(behind[torch.arange(rows)[:, None], at])


def entropy(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """-log p(y_t | y_<t), the mean of the places that count: the term of α0 in Equation 5."""
    wanted = batch["input_ids"].gather(1, batch["at"] + 1)[batch["counts"]]
    return cross_entropy(logits[batch["counts"]].float(), wanted)


def acceptance(model: Any, lessons: Any, rows: int) -> dict[str, Any]:
    """The loss on held-out texts."""
    with examining(model), torch.autocast("cpu", torch.bfloat16):
        losses = [entropy(model(batch)[2], batch) for batch in batches(lessons, rows, torch.device("cpu"))]
    return {"loss": float(torch.stack(losses).mean())}


class ControlTrainer(StreamTrainer):
    """Equation 5 without its streams."""

    acceptance = staticmethod(acceptance)

    @staticmethod
    def said(found: dict[str, Any]) -> str:
        """The figures in words."""
        return f"loss {found['loss']:.3f}"

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        with self.accelerator.autocast():
            loss = entropy(model(inputs)[2], inputs)
        return (loss, {"loss": loss}) if return_outputs else loss


class Control(StreamingTraining):
    """A drafter whose streams know nothing."""

    trainer = ControlTrainer

    def begin(self, texts: Any) -> Learner:
        learner = super().begin(texts)
        learner.__class__ = MainLearner
        return learner

    def save(self, model: Any, found: dict[str, Any]) -> dict[str, Any]:
        return super().save(model, {"acceptance": [], "acceptance_sampled": []})


def main(settings: StreamingSettings) -> None:
    """Train into `output`."""
    settings.mode, settings.prune_rank, settings.device = "tuned", 0, "cpu"
    train(Control, settings)


if __name__ == "__main__":
    command(main, None, __doc__)()
