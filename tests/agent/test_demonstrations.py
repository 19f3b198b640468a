"""Scripted conversations as rows: what is learned is what the script said, and nothing else."""

from c2.agent.chat import ByteTokenizer
from c2.agent.demonstrations import demonstrate
from c2.agent.harness import HarnessConfig
from c2.sandbox.tasks import minirepo
from c2.sandbox.tasks.minirepo import policies
from c2.sandbox.tools.toolset import ToolsConfig


def test_the_expert_is_learned_and_its_tools_are_not():
    tasks = [minirepo.generate(7, family) for family in ("operator", "rename", "feature")]
    tokenizer = ByteTokenizer()
    links = demonstrate(
        tasks, policies.expert, tokenizer, syntax="plain", tools=ToolsConfig(),
        budgets=HarnessConfig(),
    )  # fmt: skip
    assert len(links) == len(tasks)
    for task, link in zip(tasks, links, strict=True):
        whole = tokenizer.decode(link.tokens.tolist())
        learned = tokenizer.decode(link.tokens[link.loss_mask].tolist())
        turns = whole.split("<|assistant|>")
        assert turns[0] == f"<|end|><|user|>{task.prompt}<|turn_end|>"
        assert learned == "".join(turn.split("<|tool|>")[0] for turn in turns[1:])
        assert "<|tool|>pass<|turn_end|>" in whole and "pass" not in learned
        solved = minirepo.solve(task)
        assert all(
            f"<|call|>read_file {p}" in learned for p in solved if solved[p] != task.files[p]
        )
        assert (link.log_probs == 0).all() and (link.versions == -1).all()


def test_a_script_that_runs_out_of_budget_gives_what_it_got_to():
    (link,) = demonstrate(
        [minirepo.generate(7, "operator")], policies.expert, ByteTokenizer(), syntax="plain",
        tools=ToolsConfig(), budgets=HarnessConfig(max_turns=2),
    )  # fmt: skip
    text = ByteTokenizer().decode(link.tokens.tolist())
    assert text.count("<|call|>") == 2 and not text.endswith("done<|turn_end|>")
