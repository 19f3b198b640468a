"""Transcripts stay readable, whenever the process that writes them is killed."""

import json
import signal
import subprocess
import sys

from c2.agent.transcript import Transcript, read

FLOOD = """
import sys, itertools
from pathlib import Path
from c2.agent.transcript import Transcript
with Transcript(Path(sys.argv[1])) as transcript:
    for number in itertools.count():
        transcript({"event": "x", "number": number, "text": "é" * (number % 5000)})
        if number == 200:
            print("go", flush=True)
"""


def test_events_come_back(tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    events = [{"event": "turn", "text": "é\n\u2028\ud800", "n": None}, {"event": "end"}]
    for event in events:
        with Transcript(path) as transcript:
            transcript(event)
    found = list(read(path))
    assert [{k: v for k, v in event.items() if k != "time"} for event in found] == events
    assert found[0]["time"] <= found[1]["time"]
    assert len(path.read_text().splitlines()) == 2


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    with subprocess.Popen([sys.executable, "-c", FLOOD, path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    numbers = [event["number"] for event in read(path)]
    assert numbers == list(range(len(numbers))) and len(numbers) > 200


def test_a_piece_of_a_line_is_left_out_and_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"event": "a"}\n{"event": "b')
    assert [event["event"] for event in read(path)] == ["a"]
    with Transcript(path) as transcript:
        transcript({"event": "c"})
    path.write_bytes(path.read_bytes() + b'[1]\n{"event": "d"}')
    assert [event["event"] for event in read(path)] == ["a", "c"]
    assert json.loads(path.read_text().splitlines()[2])["event"] == "c"
