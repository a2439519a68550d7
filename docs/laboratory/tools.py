"""Tool calls in JSON, held to their schemas by a grammar: plain decoding, and a drafter.

Run as `python docs/laboratory/tools.py --limit 200 --sampled`. Each prompt offers three tools and asks for one of them;
names and values of the call are in the prompt.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple

from transformers import set_seed
from typer import Option, run

import hf_specdec
from shared import show

CITIES = ["Paris", "Nairobi", "Lisbon", "Osaka", "Toronto", "Reykjavik", "Santiago", "Hyderabad", "Gothenburg"]
PEOPLE = ["Amina Diallo", "Jonas Weber", "Mei Tanaka", "Carlos Ortega", "Priya Nair", "Olga Ivanova", "Sam O'Neil"]
THINGS = ["hiking boots", "a cast-iron pan", "noise-cancelling headphones", "a desk lamp", "running shorts"]
TEXT, NUMBER = {"type": "string", "maxLength": 48}, {"type": "integer", "minimum": 0, "maximum": 100000}


class Tool(NamedTuple):
    """A tool, and how somebody asks for it."""

    name: str
    fields: dict[str, Any]
    asked: str

    @property
    def schema(self) -> dict[str, Any]:
        """Of a call of it."""
        inner = {
            "type": "object",
            "properties": self.fields,
            "required": list(self.fields),
            "additionalProperties": False,
        }
        outer = {"name": {"const": self.name}, "arguments": inner}
        return {"type": "object", "properties": outer, "required": list(outer), "additionalProperties": False}


TOOLS = [
    Tool(
        "get_weather_forecast",
        {"location": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}, "num_days": NUMBER},
        "What will the weather be like in {city} over the next {n} days, in {unit}?",
    ),
    Tool(
        "send_email",
        {"recipient_name": TEXT, "subject": TEXT, "priority": {"enum": ["low", "normal", "high"]}},
        "Write a high priority email to {person} with the subject 'Trip to {city}'.",
    ),
    Tool(
        "create_calendar_event",
        {"title": TEXT, "attendee_name": TEXT, "start_hour": NUMBER, "duration_minutes": NUMBER},
        "Put a meeting called 'Planning {city}' with {person} into my calendar at {hour}, for {n} minutes.",
    ),
    Tool(
        "search_products",
        {"search_query": TEXT, "max_price_dollars": NUMBER, "sort_order": {"enum": ["price", "rating", "relevance"]}},
        "Find me {thing} for at most {n} dollars, sorted by rating.",
    ),
    Tool(
        "book_train_ticket",
        {"departure_city": TEXT, "arrival_city": TEXT, "passenger_name": TEXT, "first_class": {"type": "boolean"}},
        "Book a first class train ticket from {city} to {other} for {person}.",
    ),
    Tool(
        "transfer_money",
        {"recipient_name": TEXT, "amount": NUMBER, "currency": {"enum": ["USD", "EUR", "JPY"]}},
        "Please send {n} EUR to {person}.",
    ),
]


class Request(NamedTuple):
    """What is asked, and what the answer must look like."""

    messages: list[dict[str, str]]
    schema: dict[str, Any]


def requests(count: int) -> Iterator[Request]:
    """The same ones each time."""
    dice = random.Random(0)
    for _ in range(count):
        offered = dice.sample(TOOLS, 3)
        city, other = dice.sample(CITIES, 2)
        said: dict[str, Any] = {
            "city": city,
            "other": other,
            "person": dice.choice(PEOPLE),
            "thing": dice.choice(THINGS),
        }
        said |= {"n": dice.randint(2, 90), "hour": dice.randint(8, 18), "unit": dice.choice(["celsius", "fahrenheit"])}
        listed = "\n".join(json.dumps({"name": tool.name, "parameters": tool.fields}) for tool in offered)
        system = f"Answer with one call of a tool, as JSON with name and arguments. The tools:\n{listed}"
        asked = dice.choice(offered).asked.format(**said)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
        yield Request(messages, {"anyOf": [tool.schema for tool in offered]})


Processors = Callable[[dict[str, Any]], Any]
"""a new logits processor, by schema"""


def of_xgrammar(model: Any, tokenizer: Any, spaces: bool = False) -> Processors:
    import xgrammar
    from xgrammar.contrib.hf import LogitsProcessor

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(info)
    return lambda schema: LogitsProcessor(compiler.compile_json_schema(json.dumps(schema), any_whitespace=spaces))


def of_xgrammar_with_spaces(model: Any, tokenizer: Any) -> Processors:
    return of_xgrammar(model, tokenizer, spaces=True)


def of_llguidance(model: Any, tokenizer: Any) -> Processors:
    from llguidance import LLMatcher, hf
    from outlines.backends.llguidance import LLGuidanceLogitsProcessor

    known = hf.from_tokenizer(tokenizer, n_vocab=model.config.vocab_size)
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

    def made(schema: dict[str, Any]) -> Any:
        return LLGuidanceLogitsProcessor(LLMatcher.grammar_from_json_schema(schema, overrides=form), known, "torch")

    return made


def of_outlines_core(model: Any, tokenizer: Any) -> Processors:
    import outlines
    from outlines.backends.outlines_core import OutlinesCoreBackend, OutlinesCoreLogitsProcessor

    backend = OutlinesCoreBackend(outlines.from_transformers(model, tokenizer))
    index = cache(lambda schema: backend.get_json_schema_logits_processor(schema).index)  # which takes seconds
    return lambda schema: OutlinesCoreLogitsProcessor(index(json.dumps(schema)), "torch")


LIBRARIES = {
    "xgrammar": of_xgrammar,
    "xgrammar, any white space": of_xgrammar_with_spaces,
    "llguidance": of_llguidance,
    "outlines-core": of_outlines_core,
}
DRAFTERS = {"hybrid": hf_specdec.HybridDrafter, "prompt_lookup": hf_specdec.PromptLookupDrafter}


@dataclass
class Way:
    """One way to decode, and what it came to."""

    drafter: Any = None
    tokens: int = 0
    calls: int = 0
    """of the target"""
    seconds: float = 0.0
    """of whole calls, prefill included"""
    busy: float = 0.0
    """the same by the processor's clock, on which a busy machine does not show"""
    same: int = 0
    """texts that are plain decoding's"""
    invalid: int = 0
    """texts that are no JSON, or have not ended"""


def is_whole(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def row(name: str, way: Way, plain: Way) -> Sequence[str]:
    """Times are per token: sampled texts are not equally long."""
    wall, busy = (
        plain_s / plain.tokens / (s / way.tokens) for plain_s, s in zip(times(plain), times(way), strict=True)
    )
    counts = [way.tokens, way.calls, f"{way.tokens / way.calls:.2f}"]
    return [
        name,
        *map(str, counts),
        *(f"{s:.1f}" for s in times(way)),
        f"{wall:.2f}",
        f"{busy:.2f}",
        *map(str, (way.same, way.invalid)),
    ]


def times(way: Way) -> tuple[float, float]:
    return way.seconds, way.busy


def main(
    limit: Annotated[int, Option(help="prompts")] = 200,
    skip: Annotated[int, Option(help="of them, the first ones")] = 0,
    sampled: Annotated[bool, Option(help="at temperature 1 instead of greedily")] = False,
    library: Annotated[str, Option(help=", ".join(LIBRARIES))] = "xgrammar",
    drafter: Annotated[str, Option(help=", ".join(DRAFTERS))] = "hybrid",
    target: Annotated[str, Option(help="model")] = "smollm2",
) -> None:
    model, tokenizer = hf_specdec.load(target, dtype="bfloat16")
    processor = LIBRARIES[library](model, tokenizer)
    ways = {"plain": Way(), drafter: Way(DRAFTERS[drafter]())}
    options: dict[str, Any] = {"max_new_tokens": 200, "do_sample": sampled}
    options |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
    chosen = list(requests(limit))[skip:]
    for number, request in enumerate([chosen[0], *chosen], start=skip - 1):  # the first warms up
        inputs = tokenizer.apply_chat_template(
            request.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        texts = []
        for way in ways.values():
            given = {} if way.drafter is None else {"assistant_model": way.drafter}
            held = [processor(request.schema)]
            set_seed(number + 1)
            began, worked = time.perf_counter(), time.process_time()
            ids = model.generate(**inputs, **options, **given, logits_processor=held)
            seconds, busy = time.perf_counter() - began, time.process_time() - worked
            texts.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
            if number < skip:
                continue
            way.seconds, way.busy, way.tokens = way.seconds + seconds, way.busy + busy, way.tokens + len(texts[-1])
            way.calls += len(texts[-1]) if way.drafter is None else way.drafter.last_stats.target_calls
            way.same += texts[-1] == texts[0]
            way.invalid += not is_whole(tokenizer.decode(texts[-1], skip_special_tokens=True))
    header = ["way", "tokens", "target calls", "per call", "s", "busy s", "speed", "busy speed", "same", "invalid"]
    show(header, [row(name, way, ways["plain"]) for name, way in ways.items()])


if __name__ == "__main__":
    run(main)
