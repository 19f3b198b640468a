"""The viewer's page: what stands in it, and, where there is a browser, what a reader sees."""

import dataclasses
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from c2.agent.chat import ByteTokenizer
from c2.records import Group
from c2.rl import simulated
from experiments.viewer import View, write

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


def make_rollout(text, reward, version):
    """A rollout that says a text behind a prompt of two tokens."""
    chat = ByteTokenizer()
    ids = [chat.special("user"), *b"?", chat.special("assistant"), *text.encode()]
    n = len(ids)
    rollout = simulated.rollout("t", 0, (version,))
    sampled = np.arange(n) >= 3
    link = dataclasses.replace(
        rollout.generations[0],
        tokens=np.array(ids, np.int32),
        loss_mask=sampled,
        log_probs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        temperatures=np.ones(n, np.float32),
        routes=np.zeros((n, 1, 2), np.int16),
    )
    return dataclasses.replace(rollout, generations=(link,), reward=reward, correct=reward)


@pytest.fixture
def page(tmp_path):
    rollouts = tuple(make_rollout(f"</script> <!-- {i} ü", float(i == 2), i) for i in range(3))
    n = len(rollouts[0].generations[0].tokens)
    trainer = {(0, 0): (np.full(n, -0.25, np.float32), np.arange(n) == 4)}
    views = [View(step=7, group=Group(task="minirepo/x/1/2", rollouts=rollouts), trainer=trainer)]
    path = tmp_path / "deep" / "trajectories.html"
    write(path, views, ByteTokenizer().decode, title="A <run>")
    return path


def test_the_data_stand_in_the_page(page):
    text = page.read_text()
    data = json.loads(re.search(r"const data = (.*);\n", text)[1])
    (group,) = data["groups"]
    assert data["title"] == "A <run>" and (group["step"], group["task"]) == (7, "minirepo/x/1/2")
    assert [r["advantage"] for r in group["rollouts"]] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])
    (link,) = group["rollouts"][0]["links"]
    assert link[:3] == [["<|user|>", 0], ["?", 0], ["<|assistant|>", 0]]
    assert link[3] == ["<", 1, -0.5, 0, 0.25, 0] and link[4] == ["/", 1, -0.5, 0, 0.25, 1]
    assert group["rollouts"][1]["links"][0][3] == ["<", 1, -0.5, 1]
    assert "".join(token[0] for token in link[3:18]) == "</script> <!-- "
    assert text.count("</script>") == 1  # the data's own does not end the program
    assert not re.search(r"(src|href)\s*=|https?://", text)  # it needs no network


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_reader_sees_the_group(page, tmp_path):
    run = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", f"file://{page}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    dom = run.stdout
    assert "<title>A &lt;run&gt;</title>" in dom
    assert dom.count("<article>") == 3 and "minirepo/x/1/2" in dom
    assert "step 7 · mean 0.33 · best 1.00" in dom and "advantage 0.67" in dom
    assert dom.count('class="given mark"') == 6  # user and assistant, three times
    assert len(re.findall(r'style="background: rgba', dom)) > 30
