"""What streams are measured against, trained on the same data: a LoRA without streams, and Medusa-style heads.

    python docs/laboratory/streaming_rivals.py --kind lora --target smollm2 --data FILE --answers given --mode tuned \\
        --output DIR
    python docs/laboratory/streaming_rivals.py --kind medusa --tuned STREAMS --minutes 30 --target smollm2 \\
        --data FILE --answers given --output DIR

The LoRA has the streams' places, rank and learning rate. The heads foretell what the target that STREAMS have tuned
writes, and learn for as many minutes as they are given.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from tqdm import tqdm
from typer import Option

from hf_specdec import StreamingDrafter
from hf_specdec.commands.options import command
from hf_specdec.drafters.streaming import Upper
from hf_specdec.target.masks import as_bias, attention_windows
from hf_specdec.tools.loading.models import Pair
from hf_specdec.train.learning import learn
from hf_specdec.train.own_text import given_texts, halves, own_texts
from hf_specdec.train.streaming.learner import Learner, MainStream, StreamTraining, collate
from hf_specdec.train.streaming.run import StreamingSettings, beginning
from hf_specdec.train.streaming.states import read_states
from hf_specdec.train.writing import Text, batched
from medusa import Medusa


@dataclass(kw_only=True)
class RivalSettings(StreamingSettings):
    """What is trained."""

    kind: Annotated[Literal["lora", "medusa"], Option(help="Which of the two.")]
    tuned: Annotated[str | None, Option(help="Streams that have tuned the heads' target.")] = None
    minutes: Annotated[float, Option(help="For which the heads learn.")] = 30.0


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


class LoraTraining(StreamTraining):
    """The main stream's cross entropy."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        with self.accelerator.autocast():
            _, _, main = model(inputs)
        wanted = inputs["input_ids"].gather(1, inputs["at"] + 1).where(inputs["counts"], -1)
        known = wanted >= 0
        loss = cross_entropy(main[known].float(), wanted[known])
        return (loss, {"loss": loss}) if return_outputs else loss

    def acceptance(self, model: Any, lessons: Any, rows: int) -> dict[str, Any]:
        with torch.no_grad(), self.accelerator.autocast():
            parts = [range(at, min(at + rows, len(lessons))) for at in range(0, len(lessons), rows)]
            losses = [float(self.compute_loss(model, collate([lessons[i] for i in part]))) for part in parts]
        return {"loss": sum(losses) / len(losses)}

    def said(self, found: dict[str, Any]) -> str:
        return f"loss {found['loss']:.3f}"


def main(settings: RivalSettings) -> None:
    """Train one, into `output`."""
    work = Path(settings.output) / "training"
    work.mkdir(parents=True, exist_ok=True)
    pair = settings.load()
    texts = (
        given_texts(settings, pair)
        if settings.answers == "given"
        else own_texts(settings, pair, settings.questions(), work)
    )
    learned, held_out = halves(texts, settings.held_out, settings.seed)
    (train_lora if settings.kind == "lora" else train_heads)(settings, pair, learned, held_out, work)


def train_lora(settings: RivalSettings, pair: Pair, learned: list[Text], held_out: list[Text], work: Path) -> None:
    """A folder of streams that know nothing, and tune the target all the same."""
    upper = Upper(pair.target, settings.num_layers)
    settings.mode, settings.prune_rank = "tuned", 0
    drafter = beginning(settings, pair, upper, learned)
    lessons = read_states(pair.target, upper, learned, work / "states.bin", settings.places)
    exam = read_states(pair.target, upper, held_out, work / "held_out.bin")
    pair.target.requires_grad_(False)
    streams = drafter.streams.float().requires_grad_()
    learner = MainLearner(streams, upper, attention_windows(pair.target), settings.candidates, tuned=True)
    learn(settings, LoraTraining, learner, lessons, exam, collate, work / "checkpoints")
    drafter.streams.requires_grad_(False).to(torch.bfloat16)
    drafter.trained = True
    drafter.save_pretrained(settings.output, target=pair.target, tokenizer=pair.tokenizer)


def train_heads(settings: RivalSettings, pair: Pair, learned: list[Text], held_out: list[Text], work: Path) -> None:
    """Heads on the last hidden states, which do not change."""
    target = pair.target
    if settings.tuned is not None:
        streams = StreamingDrafter.from_pretrained(settings.tuned)
        known = streams.streams.known
        if streams.config.mode == "tuned":
            streams.tune(target)
    else:
        known = beginning(settings, pair, Upper(target, settings.num_layers), learned).streams.known
    heads = Medusa(target.config.hidden_size, settings.streams, known)
    order, hidden = sorted(range(len(learned)), key=lambda i: len(learned[i].ids)), {}
    with torch.no_grad(), tqdm(total=len(learned), desc="states") as bar:
        while order:
            some, order = batched(order, learned)
            longest = max(len(learned[i].ids) for i in some)
            ids = torch.tensor([learned[i].ids + [0] * (longest - len(learned[i].ids)) for i in some])
            for i, found in zip(some, target.base_model(input_ids=ids, use_cache=False).last_hidden_state, strict=True):
                hidden[i] = found[learned[i].start - 1 : len(learned[i].ids) - 1].clone()
            bar.update(len(some))
    weight = target.get_output_embeddings().weight.detach()[known].float()
    row = torch.full((target.config.vocab_size,), -1)
    row[known] = torch.arange(len(known))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    generator, began, steps = torch.Generator().manual_seed(settings.seed), time.monotonic(), 0
    bar = tqdm(total=settings.minutes * 60, desc="heads", unit="s")
    while (spent := time.monotonic() - began) < settings.minutes * 60:
        some = torch.randint(len(learned), (settings.batch_size,), generator=generator).tolist()
        states = torch.cat([hidden[i] for i in some]).float()
        wanted = torch.cat([_ahead(learned[i], settings.streams, row) for i in some])
        with torch.autocast("cpu", torch.bfloat16):
            logits = linear(heads.states(states), weight)
        loss = torch.stack(
            [cross_entropy(logits[:, j].float(), wanted[:, j], ignore_index=-1) for j in range(settings.streams)]
        ).mean()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * max(0.02, 1 - spent / (settings.minutes * 60))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        bar.n = round(spent)
        bar.set_postfix_str(f"step {steps}, loss {float(loss):.3f}")
    torch.save(heads.state_dict(), Path(settings.output) / "medusa.pt")


def _ahead(text: Text, heads: int, row: Tensor) -> Tensor:
    """[places, heads] what each head is to say at each place, as rows of the known tokens."""
    ids = torch.tensor([*text.ids, *[-1] * (heads + 1)])
    places = torch.arange(text.start - 1, len(text.ids) - 1)
    tokens = ids[places[:, None] + 2 + torch.arange(heads)]
    return torch.where(tokens >= 0, row[tokens], -1)


if __name__ == "__main__":
    command(main, None, __doc__)()
