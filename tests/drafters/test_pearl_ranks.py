"""PEARL over the ranks of a launch, and any drafter before a target that is spread over several."""

import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from models import llama
from on_ranks import killed_draft, killed_target, launch, saved_pair, serial, some_texts, texts
from pearl_pairs import DRAFTS, TARGET, generate
from processes import free_port

from hf_specdec import PearlDrafter, SpeculationError, SpeculationWarning
from hf_specdec.drafters.pearl.worker import Seat, Step, Worker, tcp
from hf_specdec.drafters.pearl.worker import rank as meeting
from hf_specdec.drafters.pearl.worker.wire import Kind, Link
from hf_specdec.target.probe import Support

pytestmark = pytest.mark.set_times
"""forked ranks take this clock along, each its own"""

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    saved_pair(folder)
    return folder


def check(ends, said, but=()):
    """All ranks ended well, and those that generate have said so."""
    for rank, (code, output) in enumerate(ends):
        if rank not in but:
            assert code == 0, f"rank {rank}: {output}"
    assert sum(said in output for _, output in ends) == len(ends) - 1, ends


@pytest.mark.grid
@pytest.mark.parametrize("target_ranks", [1, 2])
@pytest.mark.parametrize("function", [some_texts, pytest.param(texts, marks=pytest.mark.slow)])
def test_the_last_rank_drafts_and_the_texts_are_the_targets(function, target_ranks, folder):
    check(launch(target_ranks + 1, function, folder), "all texts agree")


@pytest.mark.parametrize("target_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_target_finishes_alone_when_the_drafting_rank_is_killed(target_ranks, folder):
    ends = launch(target_ranks + 1, killed_draft, folder)
    check(ends, "finished alone", but=[target_ranks])
    assert ends[-1][0] == -9


@pytest.mark.slow
@pytest.mark.parametrize("target_ranks", [1, 2])
def test_the_drafting_rank_ends_when_the_leading_one_is_killed(target_ranks, folder):
    ends = launch(target_ranks + 1, killed_target, folder)
    assert "noticed" in ends[-1][1] and ends[-1][0] == 0, ends


def test_any_drafter_serves_a_target_over_two_ranks(folder):
    ends = launch(2, serial, folder)
    assert all(code == 0 and "all texts agree" in output for code, output in ends), ends


# ---------------------------------------------------------------------- the script of the documents, by launchers

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    page = (ROOT / "docs" / "drafters" / "pearl-disco-streams.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (text,) = (block for block in blocks if 'worker="rank"' in block)
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(text)
    return str(path)


def started(command, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        [*TORCHRUN, "--nproc_per_node=3", "--master_port=PORT"],
        [*TORCHRUN, "--nproc_per_node=2", "--master_port=PORT"],
        [*ACCELERATE, "--multi_gpu", "--num_processes=3", "--main_process_port=PORT"],
    ],
    ids=["torchrun, 3 ranks", "torchrun, 2 ranks", "accelerate launch, 3 ranks"],
)
def test_the_printed_script_runs(launcher, script):
    process = started([part.replace("PORT", str(free_port())) for part in launcher] + [script])
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "def add(a, b):" in output and "% busy" in output, output


@pytest.fixture
def hosts():
    """Three network namespaces on a bridge in a fourth: hosts with loopback and eth0, 10.77.0.1 to 3."""
    name, made = f"hf{os.getpid()}", []

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def host(suffix):
        ip("netns", "add", name + suffix)
        made.append(name + suffix)
        ip("-n", name + suffix, "link", "set", "lo", "up")
        return name + suffix

    try:
        try:
            switch = host("s")
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for i in "123":
                one = host(i)
                ip("link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", f"port{i}", "netns", switch)
                ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
                ip("-n", one, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
                ip("-n", one, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made[1:]
    finally:
        for one in made:
            ip("netns", "del", one)


@pytest.mark.slow
def test_three_hosts_with_a_rank_each(hosts, script):
    meeting = ["--nnodes=3", "--nproc_per_node=1", "--master_addr=10.77.0.1", "--master_port=29500"]
    processes = [
        started(
            ["ip", "netns", "exec", host, *TORCHRUN, *meeting, f"--node_rank={rank}", script],
            GLOO_SOCKET_IFNAME="eth0",
        )
        for rank, host in enumerate(hosts)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert "def add(a, b):" in outputs[0] and "% busy" in outputs[0]


# ---------------------------------------------------------------------- what is refused


@pytest.fixture
def no_launch(monkeypatch):
    for name in meeting.LAUNCH:
        monkeypatch.delenv(name, raising=False)


def test_a_script_that_was_not_launched_is_told_how(no_launch, monkeypatch):
    with pytest.raises(SpeculationError, match=r"RANK is not set; start the script .*torchrun.*accelerate launch"):
        PearlDrafter(TARGET, worker="rank").join()
    for name, value in zip(meeting.LAUNCH, ("0", "1", "0", "1", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(SpeculationError, match="2 ranks or more, got WORLD_SIZE=1"):
        PearlDrafter(TARGET, worker="rank").join()


def test_a_launch_is_joined_once_and_before_everything_else(no_launch, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(SpeculationError, match="has a process group already"):
        PearlDrafter(TARGET, worker="rank").join()
    monkeypatch.setattr(meeting, "_joined", True)
    with pytest.raises(SpeculationError, match="one drafter per launch"):
        PearlDrafter(TARGET, worker="rank").join()


def test_other_workers_do_not_serve():
    drafter = PearlDrafter(TARGET, worker="thread")
    assert not drafter.drafts
    with pytest.raises(SpeculationError, match=r'serve\(\) is for worker="rank"'):
        drafter.serve()


# ---------------------------------------------------------------------- the line


@pytest.mark.parametrize("before", [[], [b""], [b"short"], [bytes(32)], [b"x" * 4096, b"GET / HTTP/1.1\r\n\r\n" * 9]])
def test_only_who_knows_the_secret_gets_the_line(before, monkeypatch):
    monkeypatch.setattr(tcp, "KNOCK", 0.2)
    secret, admitted = secrets.token_bytes(32), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=lambda: admitted.append(tcp.admit(listener, secret, 10.0)))
        accepting.start()
        strangers = [socket.create_connection(listener.getsockname()) for _ in before]
        for stranger, greeting in zip(strangers, before, strict=True):
            stranger.sendall(greeting)
        with socket.create_connection(listener.getsockname()) as friend:
            friend.sendall(secret)
            accepting.join()
            assert admitted[0].getpeername() == friend.getsockname()
        for end in (*strangers, *admitted):
            end.close()


def test_a_leading_rank_that_never_comes_is_an_error():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(
            SpeculationError,
            match=r"rank 0, the target's leading one, has not connected to the drafting rank within 0.1 seconds",
        ),
    ):
        tcp.admit(listener, bytes(32), 0.1)


def test_a_host_is_found_by_the_address_towards_the_master():
    assert tcp.address_towards("127.0.0.1", 29500) == (socket.AF_INET, "127.0.0.1")


@pytest.mark.parametrize("ahead", [0.0, 1000.0, -5e6])
def test_times_are_told_by_the_leading_ranks_clock(ahead, monkeypatch):
    mine, theirs = socket.socketpair()
    here = 17.0
    monkeypatch.setattr(tcp, "now", lambda: here)
    theirs.sendall(tcp.TIME.pack(here + ahead))
    told = tcp.clock_ahead(mine)
    line = Link(mine)
    line.ahead = told
    assert line.ahead == ahead
    Link(theirs).send(Kind.STEP, Step(7, 3, here + ahead, here + ahead + 2.0, [5, 6], [0.5, 0.25]).encode())
    kind, body = line.receive()
    step = Step.decode(body, line.ahead)
    assert kind is Kind.STEP and (step.epoch, step.draft_calls, step.tokens) == (7, 3, [5, 6])
    assert (step.began, step.ended) == (here, here + 2.0)
    line.close()


def seats(draft, **options):
    """A leading and a drafting rank within this process."""
    mine, theirs = socket.socketpair()
    drafter = PearlDrafter(draft, worker="thread", **options)
    link = Link(mine)
    drafter.config.worker = "rank"
    drafter.workers = Seat(0, 1, Support.RAGGED)
    drafter.workers.free.append(Worker(link, link.close))
    return drafter, Seat(1, 1, Support.RAGGED, Link(theirs))


def served(seat, draft):
    """The warnings that serving ended with; in a thread, where the drafting rank is this process."""
    said = []

    def run():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(meeting, "warn", said.append)
            seat.serve(draft)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, said


def test_a_target_that_closes_ends_the_serving_without_a_word():
    drafter, seat = seats(DRAFTS["good"], window=3)
    thread, said = served(seat, DRAFTS["good"])
    with drafter:
        for lengths in ((7,), (5, 9, 1, 7)):
            assert (generate(drafter, lengths) == generate(None, lengths)).all()
    thread.join(20)
    assert not thread.is_alive() and said == []
    with pytest.raises(SpeculationError, match="must be called once"):
        seat.serve(DRAFTS["good"])


def test_a_draft_that_raises_is_reported_on_both_sides():
    draft = llama(seed=9)
    drafter, seat = seats(draft, window=3)
    drafter.check_target(TARGET)
    draft.register_forward_pre_hook(lambda *_: 1 / 0)
    thread, said = served(seat, draft)
    for reason in ("division by zero", "drafting rank is gone"):
        with pytest.warns(SpeculationWarning, match=reason) as warned:
            assert (generate(drafter) == generate(None)).all()
        assert len(warned) == 1
    thread.join(20)
    assert not thread.is_alive() and "ZeroDivisionError" in said[0]


def test_a_target_that_goes_in_the_middle_of_a_call_is_reported():
    drafter, seat = seats(DRAFTS["good"], window=3)
    thread, said = served(seat, DRAFTS["good"])
    link = drafter.workers.free[0].link
    link.send(Kind.OPEN, b"")  # nonsense is enough
    link.close()
    thread.join(20)
    assert not thread.is_alive() and len(said) == 1


def test_a_replica_of_the_target_on_every_rank_is_refused():
    with pytest.raises(SpeculationError, match="has 3 ranks for the target, and this target is on 1"):
        Seat(1, 3, Support.RAGGED).check(None)
