"""The budget: chances, times, trees, and what is made of them. Against brute force over all choices."""

import itertools
import random
from collections.abc import Sequence
from math import prod

import pytest

from hf_specdec.budget import (
    Acceptance,
    Advance,
    Cost,
    CostView,
    Evidence,
    Tree,
    most_per_second,
    nodes_that_pay,
    steps_that_pay,
)
from hf_specdec.budget.acceptance import CENTRES, EDGES
from hf_specdec.budget.cost import BEYOND, FORGOTTEN, KEPT, SELDOM, TRIED, Times
from hf_specdec.budget.decision import WORTH_IT
from hf_specdec.drafters.sources.copies import add_copy, guess

KIND = Evidence.of("kind")


def random_tree(rng: random.Random, nodes: int = 12) -> Tree:
    tree = Tree()
    while len(tree) < nodes:
        tree.add(rng.randrange(-1, len(tree)), rng.randrange(6), rng.random(), KIND)
    return tree


# ---------------------------------------------------------------------- survival


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_chance_goes_from_the_guess_to_what_is_observed(share: float) -> None:
    acceptance, rng = Acceptance(), random.Random(0)
    assert acceptance.chance(KIND, 0.5) == 0.5
    for _ in range(2000):
        acceptance.observe(KIND, rng.random() < share)
    assert acceptance.chance(KIND, 0.5) == pytest.approx(share, abs=0.12)  # of 100 observations three deviations
    assert acceptance.chance(Evidence.of("another"), 0.7) == 0.7


def test_chances_follow_the_text() -> None:
    acceptance = Acceptance()
    for right in (True, False):
        for _ in range(400):
            acceptance.observe(KIND, right)
        assert abs(acceptance.chance(KIND, 0.5) - right) < 0.05


def test_estimates_of_a_band_lie_around_its_centre() -> None:
    edges = [0.0, *EDGES, 1.0]
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        assert KIND.at(low) == KIND.at((low + high) / 2) == KIND._replace(band=i) and low < CENTRES[i] < high
    assert KIND.at(1.0).band == len(EDGES)


@pytest.mark.parametrize("seen", ["nothing", "as estimated", "half as often", "the other way round", "one band"])
def test_calibrated_chances_rise_with_the_estimate(seen: str) -> None:
    acceptance, rng = Acceptance(), random.Random(0)
    share = {"as estimated": lambda x: x, "half as often": lambda x: x / 2, "the other way round": lambda x: 1 - x}
    for _ in range(4000):
        estimate = 0.95 if seen == "one band" else rng.random()
        if seen != "nothing":
            right = rng.random() < share.get(seen, lambda x: 0.3)(estimate)
            acceptance.observe(KIND.at(estimate), right)
            acceptance.observe(Evidence.of("another").at(estimate), not right)
    chances = [chance for _, chance in acceptance.calibrated([KIND] * len(CENTRES), CENTRES)]
    assert chances == sorted(chances) and all(0 <= chance <= 1 for chance in chances)
    if seen == "nothing":
        assert chances == pytest.approx(CENTRES)
    elif seen in ("as estimated", "half as often"):  # of 100 observations three deviations
        assert all(abs(chance - share[seen](x)) < 0.15 for chance, x in zip(chances, CENTRES, strict=True))
    elif seen == "the other way round":  # they are all alike, then
        assert chances[-1] - chances[0] < 0.02 and 0.3 < chances[0] < 0.7
    else:  # one that is wrong about what it knows is not believed in what it does not know
        assert chances[-2] == pytest.approx(0.3, abs=0.15) and chances[-4] <= chances[-2] == chances[-3]


# ---------------------------------------------------------------------- cost


def test_times_lie_on_a_line_through_what_was_measured() -> None:
    cost = Cost()
    for _ in range(3):
        for width in (2, 9, 17):
            cost.observe_forward(1, width, 1 + 0.1 * width)
    cost.observe_between(5, 0.5)
    assert [cost.round(1)(width) for width in (1, 5, 33)] == pytest.approx([1.6, 2.0, 4.8])
    cost.observe_between(1, 0.1)
    assert [cost.round(1)(width) for width in (1, 5, 33)] == pytest.approx([1.2, 2.0, 4.8])


def test_batches_have_lines_of_their_own_once_they_are_known() -> None:
    cost = Cost()
    for _ in range(3):
        for width in (2, 9):
            cost.observe_forward(1, width, 1 + 0.1 * width)
    assert cost.round(4)(3) == pytest.approx(cost.round(1)(12)), "as many tokens"
    for _ in range(3):
        cost.observe_forward(4, 3, 9.0)
    assert cost.round(1)(12) == pytest.approx(2.2), "what four rows take says nothing of one"
    for _ in range(3):
        cost.observe_forward(4, 5, 9.4)
    assert [cost.round(4)(width) for width in (1, 4)] == pytest.approx([8.6, 9.2])


def test_a_time_that_was_disturbed_is_measured_again() -> None:
    """Nothing is verified, as a wide forward seems to take long: it is tried again, and the figure comes down."""
    cost = Cost()
    for _ in range(3):
        for width, seconds in ((1, 1.0), (9, 50.0)):
            cost.observe_forward(1, width, seconds)
    tries = 0
    for _ in range(300):
        count = cost.tried(1) or 0
        tries += count > 0
        cost.observe_forward(1, 1 + count, 1.0)
    assert 5 <= tries <= 300 // SELDOM + 1 and cost.round(1)(9) < 1.01


def test_nothing_much_wider_is_verified_than_what_was_met() -> None:
    """One and two tokens of sixteen rows took equally long: sixty are not for that as good as free. What fewer rows
    take is told by their tokens."""
    cost = Cost()
    assert cost.most(16) == 0
    for widest in (2, 4, 8, 16):
        for _ in range(3):
            cost.observe_forward(16, widest // 2, 1.0)
            cost.observe_forward(16, widest, 1.0)
        assert cost.most(16) + 1 == BEYOND * widest and cost.most(4) + 1 == 4 * BEYOND * widest


@pytest.mark.parametrize("second", [1.2, 1.4])
def test_a_width_that_was_often_met_has_a_figure_of_its_own(second: float) -> None:
    """A second token may cost more than all that follow, or even more than with a third: kernels have their moods."""
    cost, rng = Cost(), random.Random(0)
    for _ in range(60):
        for width, takes in ((1, 1.0), (2, second), (3, 1.2), (5, 1.2), (9, 1.2)):
            cost.observe_forward(1, width, takes * rng.uniform(1, 1.1))
    seconds = cost.round(1)
    assert seconds(1) < 1.08 and seconds(2) == pytest.approx(1.05 * second, rel=0.05)
    assert all(seconds(width) == pytest.approx(1.26, rel=0.05) for width in (3, 5, 9))


def test_what_a_plain_round_takes_is_looked_at_where_all_are_wide() -> None:
    """A second token triples a forward, which nobody sees who always drafts."""
    cost, plain = Cost(), 0
    for i in range(400):
        count = cost.tried(1)
        plain += count == 0
        width = 1 + (4 + i % 3 if count is None else count)
        cost.observe_forward(1, width, 3.0 if width > 1 else 1.0)
    assert cost.round(1)(1) == 1.0 and cost.round(1)(2) > 2.9
    assert 3 <= plain <= 400 // SELDOM + TRIED.count(0)


@pytest.mark.parametrize(("said", "times"), [(0.8, 30), (1.25, 30), (3.0, 3)])
def test_a_plain_rounds_old_time_gives_way(said: float, times: int) -> None:
    """Taken beside something else, or of a short text; plain forwards of fewer rows say nothing of it."""
    cost, looks = Cost(), []
    for _ in TRIED:
        cost.observe_forward(4, 3, 1.15)
    for _ in range(times):
        cost.observe_forward(4, 1, said)
    for i in range(400):
        looks += [i] if (look := cost.tried(4) == 0) else []
        cost.observe_forward(4, 1 if look else 3, 1.0 if look else 1.15)
        cost.observe_forward(3, 1, 0.9)
    assert cost.round(4)(1) == pytest.approx(1.0, rel=0.06)
    assert looks[0] == SELDOM and 5 <= len(looks) <= 400 // SELDOM


@pytest.mark.parametrize("plain", [0, 20])
def test_a_look_that_cannot_be_plain_costs_one_round(plain: int) -> None:
    """Rows of different lengths, which are fed what lies between them."""
    cost, looks = Cost(), 0
    for _ in range(plain):
        cost.observe_forward(4, 1, 1.0)
    for _ in range(400):
        looks += (look := cost.tried(4) == 0)
        cost.observe_forward(4, 4 if look else 7, 1.2)
    assert 4 <= looks <= 400 // SELDOM + len(TRIED)


@pytest.mark.parametrize("longer", [1.3, 10.0, 1e6])
def test_what_disturbs_a_machine_now_and_then_moves_no_figure(longer: float) -> None:
    times, dice = Times(), random.Random(0)
    for _ in range(200):
        times = times.add(longer if dice.random() < 0.1 else dice.uniform(1.0, 1.02))
        assert len(times.last) < 3 or times.seconds <= 1.02
    for _ in range(KEPT):
        times = times.add(2.0)
    assert times.seconds == 2.0, "and what has changed is followed"


def test_a_first_forward_of_its_width_is_no_measure() -> None:
    cost = Cost()
    for width in range(1, 9):
        cost.observe_forward(1, width, 100.0)
    assert not cost.known
    cost.observe_forward(1, 4, 1.0)
    assert cost.known and cost.round(1)(4) == 1.0
    assert cost.tried(1) in TRIED, "a single width says nothing of others"


def test_widths_that_are_not_met_are_forgotten() -> None:
    cost = Cost()
    for _ in range(50):
        cost.observe_forward(1, 3, 1.0)
    for _ in range(FORGOTTEN):
        cost.observe_forward(1, 5, 2.0)
    assert set(cost._times) == {(1, 5)}


def test_several_widths_are_tried_first() -> None:
    cost, tried = Cost(), []
    while (count := cost.tried(1)) is not None:
        tried.append(count)
        cost.observe_forward(1, 1 + count, 1.0)
    assert tuple(tried) == TRIED and len(cost._times) == len(set(tried)) > 2


def test_where_rows_are_many_nothing_wide_is_tried() -> None:
    cost, tried = Cost(), []
    while (count := cost.tried(100)) is not None:
        tried.append(count)
        cost.observe_forward(100, 1 + count, 1.0)
    assert max(tried) == 1 and set(cost._times) == {(100, 1), (100, 2)} and len(tried) < 12


# ---------------------------------------------------------------------- trees


def test_each_token_once_behind_each_node() -> None:
    tree = Tree()
    copy, draft = Evidence.of("copy"), Evidence.of("draft")
    a = tree.add(-1, 7, 0.5, copy)
    assert tree.add(-1, 7, 0.8, draft) == a and tree.chances == [0.8] and tree.evidence == [(copy, draft)]
    assert tree.add(a, 7, 0.1, draft) == 1 and tree.parents == [-1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_orders_and_cuts(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng)
    survival = tree.survival()

    def path(node: int) -> list[int]:
        return [] if node < 0 else [*path(tree.parents[node]), node]

    assert survival == pytest.approx([prod(tree.chances[i] for i in path(node)) for node in range(len(tree))])
    order = [node for node, _ in tree.ranked()]
    assert [survival[node] for node in order] == sorted(survival, reverse=True)
    for count in range(len(tree) + 1):
        tokens, parents = tree.cut(order[:count])
        texts = [[tree.tokens[i] for i in path(node)] for node in order[:count]]
        for i, text in enumerate(texts):
            assert parents[i] < i and text == [*(texts[parents[i]] if parents[i] >= 0 else []), tokens[i]]
    promised = [sum(survival[i] for i in path(node)) for node in range(len(tree))]
    chain = [node for node, _ in tree.chain()]
    assert chain == path(chain[-1]) and [chance for _, chance in tree.chain()] == [survival[node] for node in chain]
    assert promised[chain[-1]] == pytest.approx(max(promised))


def test_a_text_tests_what_hangs_on_it() -> None:
    tree = Tree()
    a, b = tree.add(-1, 1, 0.5, KIND), tree.add(-1, 2, 0.5, KIND)
    below_a, below_b = tree.add(a, 3, 0.5, KIND), tree.add(b, 3, 0.5, KIND)
    assert list(tree.tested([2, 3, 9])) == [(a, False), (b, True), (below_b, True)]
    assert list(tree.tested([1, 4])) == [(a, True), (b, False), (below_a, False)]
    assert list(tree.tested([5, 3])) == [(a, False), (b, False)] and list(tree.tested([])) == []


def test_a_copy_is_judged_by_the_match_that_it_makes_longer() -> None:
    acceptance, tree = Acceptance(), Tree()
    for _ in range(100):
        acceptance.observe(Evidence.of("copied", match=3), True)
    add_copy(tree, [5, 6, 7, 8], 2, 4, acceptance)
    assert [evidence for (evidence,) in tree.evidence] == [Evidence.of("copied", match=n) for n in (2, 3, 4, 4)]
    assert tree.chances[1] > 0.95 and [tree.chances[i] for i in (0, 2)] == [guess(2), guess(4)]
    add_copy(tree, [6, 9], 1, 4, acceptance, branch=2, behind=0)
    assert tree.parents == [-1, 0, 1, 2, 1] and tree.evidence[1] == (
        Evidence.of("copied", match=3),
        Evidence.of("copied", 1, 1),
    )


def test_who_speaks_alone_is_judged_by_where_he_spoke_alone() -> None:
    """Two sources that are right together nine times in ten, and alone once in five."""
    rng, acceptance = random.Random(0), Acceptance()
    sources = [Evidence.of("copied", match=1), Evidence.of("recycled")]

    def drafted(speakers: Sequence[Evidence]) -> Tree:
        tree = Tree()
        for evidence in speakers:
            acceptance.add(tree, -1, [(7, acceptance.chance(evidence, 0.5), (evidence,))])
        return tree

    for _ in range(3000):
        speakers = rng.choice([sources[:1], sources[1:], sources])
        right = rng.random() < (0.9 if len(speakers) == 2 else 0.2)
        acceptance.observe_trees([drafted(speakers)], [[7 if right else 8]])
    for speakers, share in ((sources[:1], 0.2), (sources[1:], 0.2), (sources, 0.9)):
        (chance,) = drafted(speakers).chances
        assert chance == pytest.approx(share, abs=0.13)  # three deviations of the hundred that count


def test_however_often_sources_speak_evidence_has_few_values() -> None:
    acceptance, tree, band = Acceptance(), Tree(), Evidence.of("drafted").at(0.06)
    copied = Evidence.of("copied", match=3)
    spoken = [copied, Evidence.of("recycled"), Evidence.of("remembered", match=2)]
    for evidence in spoken * 3 + [Evidence.of("copied", 1, 1)]:
        acceptance.add(tree, -1, [(7, 0.5, (evidence,))])
    assert tree.evidence == [(Evidence(tuple(source for each in spoken for source in each.sources)),)]
    tree.add(-1, 8, 0.5, band)
    acceptance.add(tree, -1, [(8, 0.5, (copied,))])
    assert tree.evidence[1] == (band, copied), "estimates are calibrated as they are"


def test_a_source_that_says_a_token_twice_is_counted_once() -> None:
    acceptance, tree = Acceptance(), Tree()
    first, second = Evidence.of("copied", match=3), Evidence.of("copied", 1, 1)
    acceptance.add(tree, -1, [(7, 0.6, (first,))])
    acceptance.add(tree, -1, [(7, 0.3, (second,))])
    assert tree.chances == [0.6] and tree.evidence == [(first, second)]


# ---------------------------------------------------------------------- the decision


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.3, 10.0])
@pytest.mark.parametrize("advance", [Advance(), Advance(lockstep=True), Advance(length=1), Advance(length=100)])
@pytest.mark.parametrize("rows", [1, 3])
def test_no_other_count_gives_more_per_second(rows: int, advance: Advance, slope: float) -> None:
    rng, together = random.Random(0), advance.lockstep and rows > 1
    for _ in range(20):
        chances = [sorted((rng.random() for _ in range(rng.randrange(9))), reverse=True) for _ in range(rows)]

        def seconds(width: int) -> float:
            return 1 + slope * (width - 1)

        def speed(n: int, chances: list[list[float]] = chances) -> float:
            if together:
                kept = rows * (1 + sum(prod(row[i] for row in chances) for i in range(min(n, *map(len, chances)))))
            else:
                kept = advance.tokens([1 + sum(row[:n]) for row in chances])
            return kept / (seconds(n + 1) + 0.5)

        n, found = most_per_second(chances, seconds, 0.5, advance)
        fastest, plain = max(map(speed, range(10))), speed(0)
        assert found * (rows if together else 1) == pytest.approx(fastest if fastest > WORTH_IT * plain else plain)
        assert 0 <= n <= max(map(len, chances)) and (slope < 10 or n == 0)
        assert most_per_second(chances, seconds, 0.5, advance, most=2)[0] <= 2


def test_rows_that_wait_for_the_slowest_are_not_held_up_for_what_one_of_them_gains() -> None:
    """Of a batch that ends with its last row; where others take an ended row's place, it is worth it."""
    rows: list[list[float]] = [[0.9, 0.9, 0.9], [], [], []]

    def seconds(width: int) -> float:
        return 1 + 0.15 * (width - 1)

    assert most_per_second(rows, seconds, advance=Advance())[0] == 3
    assert most_per_second(rows, seconds, advance=Advance(length=10**9))[0] == 0


@pytest.mark.parametrize("length", [32, 256])
@pytest.mark.parametrize("rows", [2, 4, 16, 64])
def test_rounds_until_the_last_row_ends_are_foretold(rows: int, length: int) -> None:
    """Rows whose drafts of four are equally good: the luckless one is behind, and by how much is known."""
    rng, calls = random.Random(0), 30
    for alpha in (0.2, 0.5, 0.8):
        rounds = 0
        for _ in range(calls):
            left = [length] * rows
            while any(left):
                rounds += 1
                kept = [next((i for i in range(4) if rng.random() >= alpha), 4) for _ in left]
                left = [max(0, n - 1 - k) for n, k in zip(left, kept, strict=True)]
        gained = [sum(alpha**i for i in range(5))] * rows
        assert Advance(length=length).tokens(gained) / rows == pytest.approx(length * calls / rounds, rel=0.08)
        assert Advance().tokens(gained) == pytest.approx(sum(gained))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("step", [0.01, 0.2, 2.0])
def test_steps_are_made_while_they_pay(alpha: float, step: float) -> None:
    """Behind nothing: as Theorem 3.8 has it, for a target whose forward takes a second."""
    steps = steps_that_pay([[]], [1.0], [alpha], lambda width: 1.0, lambda more: more * step)
    assert (steps > 0) is (alpha > step)


def test_steps_are_counted_beyond_a_second_token_that_takes_long() -> None:
    """One and two of them do not pay, four do."""
    assert steps_that_pay([[]], [1.0], [0.9], lambda width: 1.0 if width == 1 else 2.8, lambda more: 0.05 * more) >= 4


def test_what_a_copy_says_need_not_be_drafted() -> None:
    sure = [0.99**n for n in range(1, 9)]
    assert steps_that_pay([sure], [0.01], [0.6], lambda width: 1 + 0.01 * width, lambda more: 0.1 * more) == 0
    assert steps_that_pay([[0.2]], [0.8], [0.6], lambda width: 1 + 0.01 * width, lambda more: 0.1 * more) > 0
    assert steps_that_pay([[]], [0.0], [0.9], lambda width: 1.0, lambda more: 0.001 * more) == 0


@pytest.mark.parametrize("beside", [0, 2])
def test_a_view_tells_what_a_forward_of_all_rows_takes(beside: int) -> None:
    """Of what was measured since it was made, too; there is nothing else that it does."""
    cost = Cost()
    view = CostView(cost, beside)
    assert not view.known
    for _ in range(9):
        for rows in (1, 1 + beside):
            for width in (1, 3, 9):
                cost.observe_forward(rows, width, rows + 0.1 * width)
    assert view.known and view.tried(1) == cost.tried(1 + beside) and view.most(1) == cost.most(1 + beside)
    assert [view.round(1)(width) for width in range(1, 9)] == [cost.round(1 + beside)(width) for width in range(1, 9)]
    told = {"beside", "filled", "is_set", "known", "most", "round", "tried", "widths"}
    assert {name for name in dir(view) if name[0] != "_"} == told


STAIRS = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("rows", [1, 3])
def test_what_a_forward_is_padded_to_is_filled(rows: int) -> None:
    """From the first round on; none is wider than the widest."""
    cost, dice, met = Cost(), random.Random(0), set()
    cost.pads_to(STAIRS)
    for i in range(300):
        sure = 0.3 + 0.7 * dice.random()
        chances = [[sure**n for n in range(1, 81)]] * rows
        count = nodes_that_pay(chances, rows, CostView(cost), least=i % 5)
        met.add(1 + count)
        cost.observe_forward(rows, 1 + count, 1 + 0.02 * cost.padded(1 + count))
    assert met <= set(STAIRS) and {1, STAIRS[-1]} < met


def test_slots_of_one_width_take_one_time() -> None:
    cost = Cost()
    cost.pads_to(STAIRS)
    for width in (1, 2, 11, 14, 33):
        cost.observe_forward(1, width, 1 + 0.1 * cost.padded(width))
        cost.observe_forward(1, width, 1 + 0.1 * cost.padded(width))
    seconds = cost.round(1)
    assert [seconds(width) for width in (9, 16, 17, 32, 64)] == pytest.approx([2.6, 2.6, 4.2, 4.2, 7.4])
    assert [cost.within(count) for count in (0, 5, 7, 64, 4096)] == [0, 3, 7, 63, 63]


@pytest.mark.parametrize("wider", [0, 1], ids=["widths come again", "no figure is known"])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_was_asked_for_is_verified_whatever_is_known_of_its_cost(rows: int, wider: int) -> None:
    """From the first round on, in rounds that would be plain and others."""
    cost, chances = Cost(), [[0.5, 0.3, 0.2, 0.1]] * rows
    for i in range(60):
        least = i % 4
        count = nodes_that_pay(chances, rows, CostView(cost), least=least)
        assert count >= least
        cost.observe_forward(rows, 1 + count + wider * i, 1.0 + 0.1 * count)
