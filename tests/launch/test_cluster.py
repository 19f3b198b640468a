"""Job files: read by the shell, by Kubernetes' own schema and by `launch.main`."""

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import cluster, main
from launch.processes import Processes

SLURM = ["slurm", "--config=recipe:smoke", "--workdir=/shared/a b", "--nodes=2", "--name=job"]
JOBSET = ["jobset", "--config=recipe:smoke", "--workdir=/shared/x", "--image=reg:5/a@sha256:0"]
JOBSET += ["--claim=runs:/shared"]
GPUS = ["--nodes=3", "--gpus_per_node=8"]
NASTY = 'it\'s $(HOME) `x` "$HOME" \\ $$ # %j @name'


def request(*words: str) -> cluster.Request:
    return cluster.parse(["launch/cluster.py", *words])


@pytest.fixture(scope="module")
def slurm() -> cluster.Request:
    return request(*SLURM, "--gpus_per_node=8", f"--config.data.held_out={NASTY}")


@pytest.fixture(scope="module")
def jobset() -> cluster.Request:
    return request(*JOBSET, *GPUS, f"--config.data.held_out={NASTY}")


def started(words: list[str]) -> main.Options:
    """What `launch.main` understands, which the job file calls with these words."""
    assert words[1:3] == ["-m", "launch.main"]
    return main.parse(words[2:], main.flags.FlagValues())


def test_the_scripts_pass_bash_and_shellcheck(slurm, tmp_path):
    script = tmp_path / "job.sh"
    options = {"partition": "p-1", "account": "a", "time": "1-00:00:00", "gpus_per_node": 0}
    for variant in (slurm, replace(slurm, **options)):
        script.write_text(cluster.render(variant))
        subprocess.run(["bash", "-n", script], check=True)
        if checker := shutil.which("shellcheck"):
            quoted = "--exclude=SC2016"  # what must not expand in quotes that keep it from it
            subprocess.run([checker, quoted, script], check=True)


def test_slurm_reads_what_was_asked_for(slurm):
    text = cluster.render(replace(slurm, partition="p", time="1-00:00:00"))
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert options == {
        "job-name": "job",
        "nodes": "2",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "partition": "p",
        "time": "1-00:00:00",
        "exclusive": "",
        "requeue": "",
        "open-mode": "append",
        "signal": "TERM@120",
    }
    # sbatch stops reading options at the first command
    assert text.rindex("#SBATCH") < text.index("\nset ")
    without = cluster.render(replace(slurm, gpus_per_node=0))
    assert "--ntasks-per-node=1\n" in without
    assert "gpus" not in without


@pytest.mark.parametrize(
    ("status", "restarts", "left", "requeued"),
    [
        (0, 0, 0, False),
        (2, 0, 2, False),  # bad input
        (1, 9, 0, True),
        (1, 10, 1, False),
        (137, 0, 0, True),  # a host that was lost
        (143, 10, 0, True),  # asked to stop, and saved
    ],
)
def test_the_script_runs_the_command_and_goes_back_into_the_queue(
    slurm, tmp_path, status, restarts, left, requeued
):
    """With stand-ins for Slurm's two commands that write their arguments down."""
    for name, ending in (("srun", status), ("scontrol", 0)):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > "$0.said"\nexit {ending}\n')
        command.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(
        ["bash", "-c", cluster.render(slurm)],
        env=os.environ | path | {"SLURM_RESTART_COUNT": str(restarts)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == left
    said = (tmp_path / "srun.said").read_text().split("\0")[:-1]
    assert said[0] == "--kill-on-bad-exit=1"
    options = started(said[1:])
    assert options.config == "recipe:smoke"
    assert options.workdir == "/shared/a b"
    assert options.overrides == (f"data.held_out={NASTY}",)
    assert options.processes == Processes(count=None)
    assert (tmp_path / "scontrol.said").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.said").read_text() == "requeue\00017\0"


def pod(manifest: dict) -> dict:
    (job,) = manifest["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def expand(word: str, environment: dict[str, str]) -> str:
    """What Kubernetes makes of a word of a command, by its documentation."""

    def value(match: re.Match) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, word)


def words_of(manifest: dict, index: int) -> list[str]:
    (container,) = pod(manifest)["containers"]
    environment = {"JOB_COMPLETION_INDEX": str(index), "HOME": "/root"}
    return [expand(word, environment) for word in container["command"]]


def test_manifests_fit_the_published_schema(jobset):
    """Models made from the API of JobSet and Kubernetes; what they do not know gets lost."""
    package = "kubeflow_trainer_api.models"
    models = pytest.importorskip(f"{package}.jobset_v1alpha2_job_set")
    metadata = pytest.importorskip(f"{package}.io_k8s_apimachinery_pkg_apis_meta_v1_object_meta")
    tpus = replace(jobset, nodes=None, gpus_per_node=0, topology="v5p:2x2x4")
    labelled = replace(jobset, node_selector=("cloud.example/gpu=b200", "zone="))
    for variant in (jobset, tpus, labelled, replace(jobset, gpus_per_node=0)):
        manifest = yaml.safe_load(cluster.render(variant))
        assert models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest
    assert metadata.IoK8sApimachineryPkgApisMetaV1ObjectMeta.from_dict(manifest["metadata"])


def test_a_jobset_of_gpus(jobset):
    manifest = yaml.safe_load(cluster.render(replace(jobset, node_selector=("a/b=c",))))
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (3, 3, "Indexed")
    assert pod(manifest)["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod(manifest)["nodeSelector"] == {"a/b": "c"}
    options = started(words_of(manifest, index=2))
    assert options.overrides == (f"data.held_out={NASTY}",)
    # JobSet's names: set, group of jobs, job, pod; then the service, named like the set
    coordinator = "recipe-smoke-hosts-0-0.recipe-smoke:8476"
    assert options.processes == Processes(count=3, index=2, coordinator=coordinator)
    assert f"{manifest['metadata']['name']}-{job['name']}-0-0" == coordinator.split(".")[0]
    # any failure restarts all, but for bad input; no pod restarts by itself
    assert spec["backoffLimit"] == 0
    assert pod(manifest)["restartPolicy"] == "Never"
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == pod(manifest)["containers"][0]["name"]
    assert rule["onExitCodes"]["values"] == [2]
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 10


@pytest.mark.parametrize(
    ("topology", "label", "hosts", "chips"),
    [
        ("v5p:8x8x16", "tpu-v5p-slice", 256, 4),
        ("v5p:2x2x1", "tpu-v5p-slice", 1, 4),
        ("v6e:4x4", "tpu-v6e-slice", 4, 4),
        ("v5e:1x1", "tpu-v5-lite-podslice", 1, 1),
        ("tpu7x:4x4x8", "tpu7x", 32, 4),
    ],
)
def test_a_jobset_of_tpus(jobset, topology, label, hosts, chips):
    tpus = replace(jobset, nodes=None, gpus_per_node=0, topology=topology)
    manifest = yaml.safe_load(cluster.render(tpus))
    assert manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == hosts
    assert pod(manifest)["containers"][0]["resources"] == {"limits": {"google.com/tpu": chips}}
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology.split(":")[1],
    }
    assert started(words_of(manifest, index=0)).processes == Processes(count=None)


@settings(max_examples=60, deadline=None)
@given(value=st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30))
def test_any_value_arrives_as_it_was_given(slurm, jobset, value):
    word = f"--config.data.held_out={value}"
    at = [name.startswith("--config.data") for name in slurm.command].index(True)
    command = (*slurm.command[:at], word, *slurm.command[at + 1 :])
    (line,) = re.findall(
        "^srun (.*) .. status=", cluster.render(replace(slurm, command=command)), re.M
    )
    assert shlex.split(line)[1 + at] == word
    manifest = yaml.safe_load(cluster.render(replace(jobset, command=command)))
    assert words_of(manifest, index=0)[at] == word


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "'': not one kind of cluster; legal: slurm, jobset"),
        (["k8s"], "'k8s': not one kind of cluster"),
        ([*SLURM, "--node=3"], "Unknown command line flag 'node'. Did you mean"),
        ([*SLURM, "--nodes=0"], "nodes"),
        (["slurm", "--config=recipe:smoke", "--nodes=1"], "--workdir is missing"),
        (["slurm", "--config=recipe:smoke", "--workdir=w"], "--nodes is missing"),
        (["slurm", "--workdir=w", "--nodes=1"], "--config is missing"),
        ([*SLURM, "--config.sed=1"], "config.sed: unknown key; did you mean 'seed'?"),
        ([*SLURM, "--config=kl_estimators"], "kl_estimators:full runs on one process"),
        ([*SLURM, "--name=a b"], "--name: 'a b' is not legal"),
        ([*SLURM, "--time=soon"], "--time: 'soon' is not legal"),
        ([*SLURM, "--partition=a\n#SBATCH --nodes=9"], "--partition: "),
        ([*SLURM, "--image=a"], "--image: means nothing to Slurm"),
        ([*JOBSET], "--topology or --nodes is missing"),
        ([*JOBSET, *GPUS, "--time=1"], "--time: means nothing to Kubernetes"),
        ([*JOBSET, *GPUS, "--topology=v5p:2x2x1"], "--topology: it says the hosts"),
        ([*JOBSET, "--topology=v5p:4x4"], "legal: CHIP:4x4x4 and the like, with CHIP one of v4"),
        ([*JOBSET, "--topology=h100:4"], "--topology: 'h100:4' is not legal"),
        ([*JOBSET, "--topology=v6e:3x3"], "--topology: 9 chips do not fill hosts of 4"),
        ([*JOBSET, *GPUS, "--claim=runs"], "--claim: 'runs' is not legal; legal: NAME:/FOLDER"),
        ([*JOBSET, *GPUS, "--workdir=/other/x"], "legal: a path in /shared"),
        ([*JOBSET, *GPUS, "--workdir=/shared/../x"], "legal: a path in /shared"),
        ([*JOBSET, *GPUS, "--node_selector=a"], "--node_selector: 'a' is not legal"),
        ([*JOBSET, *GPUS, "--image="], "--image: '' is not legal"),
        ([*SLURM, "--out=/no/such/folder/x"], "No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words, message, capsys):
    assert cluster.run_main(["launch/cluster.py", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_prints_or_writes_the_same(tmp_path, capsys):
    assert cluster.run_main(["launch/cluster.py", *SLURM]) == 0
    printed = capsys.readouterr().out
    out = tmp_path / "job.sh"
    assert cluster.run_main(["launch/cluster.py", *SLURM, f"--out={out}"]) == 0
    assert capsys.readouterr().out == ""
    assert out.read_text() == printed
