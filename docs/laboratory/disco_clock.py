"""DISCO's table by the clock: every method as `generate` runs it, prompt by prompt in turn."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from disco_baselines import LONGEST, Chosen, OracleDrafter, PerplexityDrafter
from hf_specdec.drafters.disco import DiscoDrafter, StopClassifier
from hf_specdec.tools.bench.methods import Method, build_method
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.prompts import Prompt
from hf_specdec.train.disco.extraction import Regime
from hf_specdec.train.disco.records import record_text


def clock_methods(chosen: Sequence[Chosen], draft: PreTrainedModel, classifier: StopClassifier) -> dict[str, Method]:
    """The methods of the table as `generate` runs them."""
    by_name = {one.name: one.make() for one in chosen}
    longest = {one.name: one.longest for one in chosen}
    methods = {
        "plain": build_method("plain", draft),
        "static 5": build_method("draft_model:num_draft_tokens=5", draft),
        "static optimal": build_method(f"draft_model:num_draft_tokens={by_name['static optimal'].gamma}", draft),  # type: ignore[attr-defined]
        "static, best on test": build_method(
            f"draft_model:num_draft_tokens={by_name['static, best on test'].gamma}",  # type: ignore[attr-defined]
            draft,
        ),
        "transformers heuristic": build_method("hf-assisted:num_assistant_tokens_schedule=heuristic", draft),
        "transformers confidence": build_method("hf-confidence", draft),
    }
    drafters: dict[str, Any] = {
        "perplexity": PerplexityDrafter(draft, by_name["perplexity"].limit, LONGEST),  # type: ignore[attr-defined]
        "DISCO, budget rule": DiscoDrafter(draft, classifier, rule="budget", max_draft_tokens=LONGEST),
    }
    for rule in ("token", "draft"):
        name = f"DISCO, {rule} rule"
        tau = by_name[name].tau  # type: ignore[attr-defined]
        drafters[name] = DiscoDrafter(
            draft, classifier, rule=rule, tau=tau, tau_sampled=tau, max_draft_tokens=longest[name]
        )
    return methods | {n: Method(n, {"assistant_model": d}, draft, d) for n, d in drafters.items()}


def clock(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: Any,
    methods: dict[str, Method],
    prompts: Sequence[Prompt],
    regime: Regime,
) -> dict[str, float]:
    """Seconds per new token of each method; methods take turns, in rotated order, at each prompt.

    In greedy decoding the oracle runs, too: it is told the text.
    """
    seconds: dict[str, list[float]] = {}
    for number, prompt in enumerate(tqdm(prompts, desc="by the clock", unit=" prompts")):
        inputs = batch([prompt_ids(tokenizer, prompt)], tokenizer.pad_token_id, target.device)
        ids, columns = inputs["input_ids"], inputs["input_ids"].shape[1]
        turn = dict(methods)
        if not regime.do_sample:
            text = target.generate(input_ids=ids, pad_token_id=tokenizer.pad_token_id, **regime.options())[0]
            accepted = record_text(target, draft, text, columns, 1, False, lookup=False).accepted.tolist()
            turn["oracle"] = Method("oracle", {"assistant_model": OracleDrafter(draft, accepted)}, draft)
        names = list(turn)
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            torch.manual_seed(number)
            with turn[name].prepared():
                began = time.perf_counter()
                output = target.generate(
                    **inputs,
                    pad_token_id=tokenizer.pad_token_id,
                    **regime.options(),
                    **turn[name].kwargs,
                )
                elapsed = time.perf_counter() - began
            if number:  # the first prompt warms up
                seconds.setdefault(name, []).append(elapsed / (output.shape[1] - columns))
    return {name: sum(each) / len(each) for name, each in seconds.items()}
