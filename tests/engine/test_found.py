"""What is found with a recorded forward leaves caches, features and drafts as judging on the host does."""

import gemma4_models
import models
import pytest
import torch
from toy_drafters import Future, Toy, ToySession
from traced import traced

from hf_specdec import PromptLookupDrafter
from hf_specdec.protocol import Draft, DraftContext, Sequences, Verdict

CAPTURED = {"forwards": "captured"}


@pytest.mark.parametrize("seed", [0, 3, 7, 10])
def test_a_cache_of_rows_that_ended_goes_on(seed: int) -> None:
    """A finished row of a tree in lockstep is fed no padding: what it has missed is read at the end."""
    model = models.llama()
    call = models.prompts([9, 4, 7], seed=seed) | {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 3}
    call |= {"return_dict_in_generate": True, "stopping_criteria": [lambda ids, _: torch.zeros(len(ids)).bool()]}
    call["eos_token_id"] = int(model.generate(**call, eos_token_id=None).sequences[seed % 3, -34])

    def goes_on(out: object) -> torch.Tensor:
        ids = torch.cat([out.sequences, torch.full((3, 1), 5)], 1)
        more = {"past_key_values": out.past_key_values, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 3}
        return model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **more)

    plain = model.generate(**call)
    keys, after = [layer.keys.clone() for layer in plain.past_key_values.layers], goes_on(plain)
    ours = model.generate(**call, assistant_model=PromptLookupDrafter(num_branches=3), speculation=CAPTURED)
    for layer, expected in zip(ours.past_key_values.layers, keys, strict=True):
        torch.testing.assert_close(layer.keys, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(ours.sequences, plain.sequences) and torch.equal(goes_on(ours), after)


def test_shared_keys_and_values_are_those_of_the_accepted_path() -> None:
    """They are read before the path is moved to the front."""
    target = gemma4_models.target("E2B")
    call = {"input_ids": torch.arange(5, 15)[None], "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    call |= {"pad_token_id": 0}
    plain = target.generate(**call)
    future, seen = Future(plain), list[list[dict[object, torch.Tensor]]]()

    class Asking(ToySession):
        features = ("full_attention", "sliding_attention", -1)

        def observe(self, verdict: Verdict) -> None:
            seen[-1].append({name: states.clone() for name, states in verdict.features.items()})

    class Bushy(Toy):
        session_class = Asking

    def tree(context: DraftContext, sequences: Sequences, room: list[int]) -> Draft:
        """A wrong sibling before each right one."""
        tokens, parents = list[int](), list[int]()
        for token in future(sequences, room, 3)[0]:
            parents += [len(tokens) - 1] * 2
            tokens += [(token + 1) % 98, token]
        return Draft.from_trees([(tokens, parents)])

    for forwards in ("eager", "captured"):
        seen.append([])
        out = target.generate(**call, assistant_model=Bushy(tree, trees=True), speculation={"forwards": forwards})
        assert torch.equal(out, plain)
    assert len(seen[0]) == len(seen[1]) > 3
    for eager, captured in zip(*seen, strict=True):
        for name, states in eager.items():
            torch.testing.assert_close(captured[name], states, atol=1e-4, rtol=1e-4)


def test_what_is_behind_a_rows_draft_is_never_fed() -> None:
    """Whatever stands there, also where the host knows the tokens, and a tree becomes its first branch."""
    model = models.build("Falcon ALiBi")
    call = models.prompts([9, 4, 7]) | {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    call |= {"eos_token_id": None}
    plain = model.generate(**call)
    future = Future(plain)

    def propose(context: DraftContext, sequences: Sequences, room: list[int]) -> Draft:
        rows = future(sequences, room, 3)
        rows[0] = []
        width = max(map(len, rows)) or 1
        tokens = [row + [-1] * (width - len(row)) for row in rows]
        return Draft(torch.tensor(tokens), [len(row) for row in rows], [list(range(-1, width - 1))] * 3, known=tokens)

    with traced():
        assert torch.equal(model.generate(**call, assistant_model=Toy(propose, trees=True)), plain)
