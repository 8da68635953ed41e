"""`tapereel train` with players: two policies learn, a third stays, and whoever reads the run finds each of them."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents.engines.embedded import char_tokenizer, load_pretrained, weights_digest
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.rendering import Renderer
from tapereel.cli import main
from tapereel.finetune import TrainConfig, episode_of, rows
from tapereel.finetune.data.provenance import drop_others
from tapereel.finetune.inspect import reproduce
from tapereel.finetune.loop import BrokenHistory
from tapereel.finetune.loop.loop import UnknownAgent
from tapereel.finetune.loop.plan import Plan
from tapereel.finetune.run import train
from tapereel.finetune.run.loaded_run import LoadedRun
from tapereel.finetune.trainer import Ranks, checkpoints
from tapereel.tapes.common import ConfigError, dump_config, load_config, write_yaml
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Record, Use
from tapereel.tapes.store import Store, read_metrics
from tapereel.tapes.store.run_directory import recorded_config
from tapereel.tapes.view import RunView

from ...cli.lab import answer_of, killed, refusal_of
from .stage import (
    EXAMPLE,
    GUIDE,
    JUDGE,
    SEEKER,
    WORLD,
    config,
    frozen,
    learns,
    published,
    read_back,
    settings,
    uses,
    versions,
)


def lineages(run: Path) -> tuple[str, str]:
    lead = json.loads((run / "results.json").read_text())["lineage"]
    return lead, f"{lead}-seeker"


def digest(folder: Path) -> str:
    return weights_digest(load_pretrained(folder).model.state_dict())


def test_both_learn_each_from_its_own_words_and_the_frozen_one_stays(trained: Path, models: Path):
    guide, seeker = lineages(trained)
    found = uses(trained)
    assert {name: [use.update for use in own] for name, own in found.items()} == {guide: [0, 1, 2], seeker: [0, 1, 2]}
    with Store.open(trained) as store:
        by = {(tape.id, call.call): call.by for tape in store.tapes() for call in tape.calls}
        books = store.books()
    for name, path in ((guide, GUIDE), (seeker, SEEKER)):
        assert {by[item[0], item[1]] for use in found[name] for item in use.items} == {path}
        own = [published(trained)[f"{name}:{n}"] for n in range(4)]
        assert len(set(own)) == 4, "each update changed its weights"
        assert own[0] == digest(models / path.split("/")[1])
    judge = digest(models / "guide")
    assert versions(trained)[JUDGE] == {f"{judge[:12]}:0"}
    assert published(trained)[f"{judge[:12]}:0"] == judge
    assert books.closes
    assert books.tokens["context"] == 3 * 24, "the judge's word in each episode that was trained on"


def test_what_is_frozen_is_context_in_the_rows_of_the_others(trained: Path):
    guide, seeker = lineages(trained)
    with Store.open(trained) as store:
        use = uses(trained)[guide][0]
        tape = store.tape(use.info["tapes"][0])
        whole = rows(tape)
        assert {row.agents[k] for row in whole for k in row.call} == {GUIDE, SEEKER, JUDGE}
        own, others = drop_others(whole, [GUIDE])
        judged = [call.call for call in tape.calls if call.by == JUDGE]
        assert {entry[1] for entry in others} >= set(judged)
        assert all((row.labels() >= 0).sum() == 1 and set(row.agents) == {GUIDE} for row in own)
        for name, path in ((guide, GUIDE), (seeker, SEEKER)):
            use = uses(trained)[name][0]
            batch = Plan.of(use).batch(name, lambda tape: (rows(store.tape(tape)), episode_of(store.tape(tape))))
            assert {row.agents[k] for row in batch.rows for k in row.call} == {path}


def test_held_out_episodes_are_sampled_with_the_weights_of_their_moment(trained: Path, capsys):
    """Each token's log-prob is asked of the checkpoint of the version that the tape names for its agent: it would not
    agree if the seeker had been sampled with the guide's weights, or with those of another moment."""
    guide, seeker = lineages(trained)
    for when, n in (("before", 0), ("update-000001", 1), ("update-000002", 2), ("after", 3)):
        found = versions(trained, split=f"eval-{when}-sampled")
        assert (found[GUIDE], found[SEEKER]) == ({f"{guide}:{n}"}, {f"{seeker}:{n}"})
    said = answer_of(capsys, "replay", "model", str(trained))
    assert {one["outcome"] for one in said["verdicts"]} == {"verified"}
    with Store.open(trained) as store:
        assert sum(one["checked"]["tokens"] for one in said["verdicts"]) == store.books().sampled


def test_metrics_and_results_tell_of_each(trained: Path):
    lines = read_metrics(trained / "metrics.jsonl")
    for line in (line for line in lines if line["phase"] == "rl"):
        assert {
            f"reward/agent/{GUIDE}",
            f"reward/agent/{SEEKER}",
            "players/seeker/loss",
            "players/seeker/grad_norm",
        } <= set(line)
        assert f"reward/agent/{JUDGE}" not in line
        assert line["reward"] == pytest.approx(line[f"reward/agent/{GUIDE}"] + line[f"reward/agent/{SEEKER}"])
    for line in (line for line in lines if line["phase"] == "evaluation"):
        assert line["sampled"] == pytest.approx(line[f"sampled/{GUIDE}"] + line[f"sampled/{SEEKER}"])
    assert [one.update for one in checkpoints(trained / "checkpoints")] == [1, 2, 3]
    assert [one.update for one in checkpoints(trained / "checkpoints" / "seeker")] == [1, 2, 3]


def test_a_finished_run_that_is_gone_on_with_says_the_same(trained: Path):
    before = published(trained), (trained / "metrics.jsonl").read_bytes()
    summary = train(read_back(trained), trained, resume=True)
    assert (published(trained), (trained / "metrics.jsonl").read_bytes()) == before
    seeker, judge = summary.players["seeker"], summary.players["judge"]
    assert (seeker.agents, seeker.lineage, seeker.updates) == ((SEEKER,), lineages(trained)[1], 3)
    assert seeker.model is not None
    assert digest(Path(seeker.model)) == published(trained)[f"{seeker.lineage}:3"]
    assert (judge.lineage, judge.updates) == (None, 0)
    assert set(summary.agents) == {GUIDE, SEEKER}


def test_every_verb_reads_such_a_run(trained: Path, tmp_path: Path, capsys):
    _, seeker = lineages(trained)
    run = str(trained)
    for verb in ("verify", "audit"):
        assert answer_of(capsys, verb, run)
    found = answer_of(capsys, "reproduce", run)
    assert (found["outcome"], found["of"], set(found["players"])) == ("verified", 3, {"seeker"})
    theirs = found["players"]["seeker"]
    assert (theirs["outcome"], theirs["lineage"], theirs["updates"]) == ("verified", seeker, 3)
    assert (theirs["checkpoints"], theirs["published"]) == (3, 4)
    one = trained / "checkpoints" / "seeker" / "update-000002"
    for words in ((run, str(one)), (str(one),)):
        found = answer_of(capsys, "reproduce", *words)
        assert (found["outcome"], found["lineage"], found["of"], found["run"]) == ("verified", seeker, 2, run)
    assert answer_of(capsys, "show", run, "--taught", str(one), "--last", "1")["count"] == 2 * 24
    tape = uses(trained)[seeker][2].info["tapes"][0]
    (told,) = answer_of(capsys, "explain", run, tape)["tapes"]
    fates = {row["begins"]: {token["fate"] for token in row["tokens"] if token["own"]} for row in told["rows"]}
    with Store.open(trained) as store:
        by = {call.call: call.by for call in store.tape(tape).calls}
    assert {by[call]: fate for call, fate in fates.items()}[JUDGE] == {"context"}
    assert answer_of(capsys, "replay", "agent", run, tape)["verdicts"][0]["outcome"] == "verified"
    for words, lineage in (((), lineages(trained)[0]), (("--policy", "seeker"), seeker)):
        (found,) = answer_of(capsys, "explain", run, "--recipe", "own", "--recipe", "dr_grpo", *words)["experiments"]
        assert (found["lineage"], found["version"]) == (lineage, f"{lineage}:2")
        assert found["lines"][0]["recorded"] is True, "its own weights, trainer and tokens"
    assert " seeker" in refusal_of(capsys, "explain", run, "--recipe", "own", "--policy", "judge")
    assert main(["view", run, "--out", str(tmp_path / "view.html")]) == 0
    capsys.readouterr()
    with RunView(trained) as view:
        points = view.curve()["points"]
    guide = lineages(trained)[0]
    assert [point["phase"] for point in points] == [f"rl, {guide}"] * 3 + [f"rl, {seeker}"] * 3
    only = answer_of(capsys, "export", run, str(tmp_path / "guide.jsonl"), "--agent", GUIDE, "--split", "train")
    every = answer_of(capsys, "export", run, str(tmp_path / "all.jsonl"), "--split", "train")
    assert "--format rows" in refusal_of(
        capsys, "export", run, str(tmp_path / "x"), "--format", "sft", "--agent", GUIDE
    )
    assert 3 * only["own_tokens"] == every["own_tokens"] >= 3 * 72


def test_a_seeker_s_checkpoint_that_was_changed_breaks_the_verdict_of_the_run(models: Path, tmp_path: Path, capsys):
    train(config(models, updates=1), tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "seeker" / "update-000001" / "state.json"
    config_file = tmp_path / "run" / "config.yaml"
    text = config_file.read_text()
    config_file.write_text(text.replace(str(models / "seeker"), str(models / "guide")))
    found = answer_of(capsys, "reproduce", str(tmp_path / "run"), code=2)
    assert str(models / "guide") in found["players"]["seeker"]["reason"]
    config_file.write_text(text)
    state.write_text(json.dumps({**json.loads(state.read_text()), "update": 0}))
    assert answer_of(capsys, "reproduce", str(tmp_path / "run"), code=1)["outcome"] == "verified", "the guide's own is"


# Going on


def test_a_death_between_the_last_records_of_two_policies_is_made_up_for(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(secrets, "token_hex", lambda n: "00" * n)  # seeds follow from the lineage
    train(config(models, updates=2), tmp_path / "whole")
    append = Store.append_layer

    def dies(store: Store, record: Record) -> Any:
        if isinstance(record, Use) and (record.lineage, record.update) == ("00000000-seeker", 1):
            raise KeyboardInterrupt
        return append(store, record)

    monkeypatch.setattr(Store, "append_layer", dies)
    with pytest.raises(KeyboardInterrupt):
        train(config(models, updates=2), tmp_path / "run")
    monkeypatch.setattr(Store, "append_layer", append)
    assert {name: len(own) for name, own in uses(tmp_path / "run").items()} == {"00000000": 2, "00000000-seeker": 1}
    summary = train(config(models, updates=2), tmp_path / "run", resume=True)
    assert (summary.updates, summary.players["seeker"].updates, summary.books_close) == (2, 2, True)
    assert published(tmp_path / "run") == published(tmp_path / "whole")
    assert checkpoints(tmp_path / "run" / "checkpoints" / "seeker")[-1].update == 2
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "rl"]
    assert [line["update"] for line in lines] == [1, 2]


@pytest.mark.kill
@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", [30, 61, 100])
def test_a_killed_run_goes_on_with_all_of_its_policies(models: Path, tmp_path: Path, capsys, at: int):
    out = tmp_path / "run"
    more = settings(models, updates=6, max_lag=1, env=f"{WORLD}:Deadly", checkpoint_every=2)
    (tmp_path / "players.json").write_text(json.dumps(more))
    words = ("train", "--config", str(tmp_path / "players.json"), "--out", str(out))
    killed(at, *words)
    before = uses(out)
    assert sum(map(len, before.values())) < 12
    found = answer_of(capsys, *words, "--resume")
    guide, seeker = lineages(out)
    assert (found["updates"], found["players"]["seeker"]["updates"], found["books_close"]) == (6, 6, True)
    after = uses(out)
    assert [use.update for use in after[guide]] == [use.update for use in after[seeker]] == list(range(6))
    for name, own in before.items():
        assert after[name][: len(own)] == own, "what was recorded is as it was"
    verdict = answer_of(capsys, "reproduce", str(out))
    assert (verdict["outcome"], verdict["players"]["seeker"]["outcome"]) == ("verified", "verified")
    lines = [line for line in read_metrics(out / "metrics.jsonl") if line["phase"] == "rl"]
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("who", ["seeker", "judge"])
def test_other_weights_than_the_run_began_with_are_refused(models: Path, tmp_path: Path, who: str):
    copy = tmp_path / "model"
    tokenizer = load_pretrained(models / "guide").tokenizer
    load_pretrained(models / "seeker").model.save_pretrained(copy)
    tokenizer.save_pretrained(copy)
    players = {"seeker": learns(models), "judge": frozen(models / "guide")}
    players[who]["engine"] = {"kind": "embedded", "model": str(copy)}
    begun = config(models, updates=1, players=players)
    train(begun, tmp_path / "run")
    load_pretrained(models / "guide").model.save_pretrained(copy)
    with pytest.raises(BrokenHistory, match=rf"[0-9a-f]{{12}}.*{re.escape(str(copy))}.*[0-9a-f]{{12}}"):
        train(begun, tmp_path / "run", resume=True)


# Who may play


@pytest.mark.parametrize("engine", ["texts", "tokens", "itself"])
def test_any_engine_that_writes_alike_may_be_frozen(models: Path, tmp_path: Path, engine: str):
    made = {
        "texts": {"kind": "scripted", "answers": ["b", "b"]},
        "tokens": {"kind": "scripted", "answers": ["b", "b"], "tokenizer": str(models / "guide")},
        "itself": {"kind": "embedded", "model": str(models / "guide")},
    }[engine]
    play = config(models, updates=1, players={"past": {"agents": [SEEKER, JUDGE], "engine": made, "frozen": True}})
    summary = train(play, tmp_path / "run")
    assert (summary.updates, summary.books_close, summary.players["past"].lineage) == (1, True, None)
    found = uses(tmp_path / "run")
    assert set(found) == {summary.lineage}
    with Store.open(tmp_path / "run") as store:
        tape = store.tape(found[summary.lineage][0].info["tapes"][0])
        trained_calls = {item[1] for use in found[summary.lineage] for item in use.items if item[0] == tape.id}
        by = {call.call: call.by for call in tape.calls}
    assert {by[call] for call in trained_calls} <= {GUIDE}
    begun = digest(models / "guide")
    spoke = versions(tmp_path / "run")
    assert spoke[SEEKER] == spoke[JUDGE] == ({f"{begun[:12]}:0"} if engine == "itself" else set())
    assert published(tmp_path / "run")[f"{summary.lineage}:1"] != begun


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"agents": None}, r"\bloop\.agents\b"),
        ({"agents": [GUIDE, SEEKER]}, r"'pair/seeker'.*loop\.agents.*players\.seeker"),
        (
            {
                "players": {
                    "a": {"agents": [JUDGE, JUDGE], "engine": {"kind": "scripted", "answers": ["b"]}, "frozen": True}
                }
            },
            "'pair/judge'",
        ),
        (
            {"players": {"a": {"agents": [JUDGE], "engine": {"kind": "scripted", "answers": ["b"]}}}},
            "scripted.*`frozen: true`",
        ),
        (
            {"players": {"a": {"agents": [JUDGE], "engine": {"kind": "litellm", "model": "openai/x"}}}},
            "litellm.*`frozen: true`",
        ),
        (
            {"players": {"a/b": {"agents": [JUDGE], "engine": {"kind": "scripted", "answers": ["b"]}, "frozen": True}}},
            "players.a/b.*pattern",
        ),
        (
            {"players": {"a": {"agents": [], "engine": {"kind": "scripted", "answers": ["b"]}, "frozen": True}}},
            r"players\.a\.agents.*\b1\b",
        ),
        (
            {
                "players": {
                    "a": {
                        "agents": [JUDGE],
                        "engine": {"kind": "scripted", "answers": ["b"]},
                        "frozen": True,
                        "optimiser": {"lr": 0.1},
                    }
                }
            },
            "`optimiser`.*`frozen: false`",
        ),
        (
            {"players": {"a": {"agents": [JUDGE], "engin": {}}}},
            r"players\.a\.engin\b.*players\.a\.engine\b",
        ),
        ({"warm": {"tapes": "x"}}, r"players\.NAME\.engine\.model"),
    ],
)
def test_players_that_make_no_sense_are_refused(models: Path, tmp_path: Path, change: Any, says: str):
    (tmp_path / "players.json").write_text(json.dumps(settings(models, **change)))
    with pytest.raises(ConfigError, match=says):
        load_config(TrainConfig, tmp_path / "players.json")


def test_adapters_of_a_player_drain_as_those_of_the_loop_do(models: Path):
    engine = {"kind": "vllm", "model": "x", "urls": ["http://127.0.0.1:1"], "weights": {"kind": "adapters", "rank": 2}}
    player = {"agents": [SEEKER], "engine": engine}
    with pytest.raises(ValueError, match=r"loop\.in_flight=reprefill.*players\.seeker\.engine\.weights=reload"):
        config(models, players={"seeker": player}, in_flight="reprefill")
    made = config(models, players={"seeker": player})
    assert (made.players["seeker"].engine.kind, made.loop.in_flight) == ("vllm", "drain")
    assert config(models, players={"seeker": {**player, "frozen": True}}).loop.in_flight == "reprefill"


SERVED = [("agent", "a:a"), ("env", "a:e"), ("tasks", "a:t")]
SERVED += [("engine", {"kind": "vllm", "model": "x", "urls": ["http://127.0.0.1:1"]})]


@pytest.mark.parametrize(
    ("sets", "begins", "remedy"),
    [
        (
            ["trainer.lora.rank=2", "trainer.dtype=bfloat16"],
            "trainer.lora",
            ["engine.weights.kind=adapters", "engine.weights.rank=2", "trainer.lora=null"],
        ),
        (["engine.kind=sglang", "trainer.lora.rank=2"], "trainer.lora", ["trainer.lora=null"]),
        (["trainer.dtype=bfloat16"], "trainer.dtype=bfloat16", ["engine.weights.kind=adapters"]),
        (["engine.weights=adapters", "loop.in_flight=reprefill"], "loop.in_flight", ["engine.weights=reload"]),
        (["engine.weights.kind=transfer", "engine.weights.rank=2"], "unknown key", ["engine.weights=adapters"]),
        (["engine.weights=lora"], "engine.weights", ["engine.weights=adapters"]),
        (["engine.weights.rank=2"], "engine.weights", ["engine.weights.kind=adapters"]),
        (["engine.kind=sglang", "engine.weights=adapters"], "engine", ["engine.weights=reload"]),
    ],
)
def test_ways_to_send_weights_that_make_no_sense_are_refused_with_what_to_set(
    sets: list[str], begins: str, remedy: list[str]
):
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, None, [*SERVED, *sets])
    told = str(refused.value)
    assert told.startswith(begins)
    assert "127.0.0.1" not in told, "the other settings"
    assert load_config(TrainConfig, None, [*SERVED, *sets, *remedy])


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("engine.publish=lora", "engine.weights"),
        ("engine.nccl.port=3", "engine.weights.port"),
        ("loop.publish=drain", "loop.in_flight"),
        ("players.x.engine.publish=transfer", "players.x.engine.weights"),
    ],
)
def test_a_new_configuration_with_an_earlier_name_gets_the_new_one(earlier: str, now: str):
    player = [("players.x", {"agents": ["b"], "engine": {"kind": "vllm", "model": "x"}})]
    with pytest.raises(ConfigError, match=rf"unknown key .*did you mean {re.escape(now)}\?"):
        load_config(TrainConfig, None, [*SERVED, *player, earlier])


EARLIER = {
    "reload": ({"publish": "reload", "nccl": None}, None, {"kind": "reload"}),
    "transfer": ({"publish": "transfer", "nccl": None}, None, {"kind": "transfer"}),
    "nccl": (
        {"publish": "nccl", "nccl": {"address": "10.0.0.1", "port": 7}},
        None,
        {"kind": "broadcast", "address": "10.0.0.1", "port": 7},
    ),
    "nccl anywhere": ({"publish": "nccl", "nccl": None}, None, {"kind": "broadcast"}),
    "lora": (
        {"publish": "lora", "nccl": None},
        {"rank": 3, "alpha": 6, "targets": ["q_proj"], "quantise": None},
        {"kind": "adapters", "rank": 3, "alpha": 6, "targets": ["q_proj"], "quantise": None},
    ),
}


@pytest.mark.parametrize("way", EARLIER)
def test_a_recorded_configuration_with_earlier_names_is_read_with_the_new_ones(way: str, tmp_path: Path):
    before, lora, now = EARLIER[way]
    server = {"kind": "vllm", "model": "x", "urls": ["http://127.0.0.1:1"]}
    mode = "drain" if lora else "reprefill"
    player = {"agents": ["b"], "trainer": {"lora": lora}}
    shared = dict(SERVED)
    old = shared | {
        "engine": {**server, **before},
        "trainer": {"lora": lora},
        "loop": {
            "publish": mode,
            "keep_checkpoint_bytes": 10**9,
            "agents": ["a"],
            "teacher": {**server, "model": "y", "publish": "reload", "nccl": None},
        },
        "players": {"x": {**player, "engine": {**server, **before}}},
    }
    new = shared | {
        "engine": {**server, "weights": now},
        "loop": {"in_flight": mode, "agents": ["a"], "teacher": {**server, "model": "y"}},
        "players": {"x": {"agents": ["b"], "engine": {**server, "weights": now}}},
    }
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(write_yaml(old))
    with pytest.raises(ConfigError, match="publish"):
        load_config(TrainConfig, run / "config.yaml")  # not a run's record
    (run / "results.json").write_text('{"format": 1}')
    found = load_config(TrainConfig, run / "config.yaml")
    assert found == TrainConfig.model_validate(new)
    recorded = recorded_config(run)
    assert recorded["engine"]["weights"] == now
    assert "publish" not in str(recorded)
    (run / "config.yaml").write_text(dump_config(found))
    assert load_config(TrainConfig, run / "config.yaml") == found


def test_models_that_write_otherwise_are_refused_before_anything_is_written(models: Path, tmp_path: Path):
    tokenizer = char_tokenizer("abcdefgh")
    tiny_model(tokenizer, "micro", context=32).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    assert Renderer(tokenizer).tokenizer_hash
    play = config(models, players={"judge": frozen(tmp_path / "other")})
    with pytest.raises(UsageError, match=r"'engine', 'players\.judge'"):
        train(play, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_agent_that_nobody_is_stops_the_run(models: Path, tmp_path: Path):
    play = config(models, players={"seeker": {**learns(models), "agents": ["pair/seker"]}})
    with pytest.raises(UnknownAgent, match=r"seeker.*'pair/seker'"):
        train(play, tmp_path / "run")
    for path, names in (("jugde", r"players\.judge.*'pair/'"), ("pair/jugde", "'pair/jugde'.*'pair/judge'")):
        with pytest.raises(UnknownAgent, match=names):
            train(config(models, players={"judge": {**frozen(models / "guide"), "agents": [path]}}), tmp_path / path)


def test_several_processes_train_no_players(models: Path, tmp_path: Path):
    class Two(Ranks):
        size = 2

    with pytest.raises(UsageError, match=r"players\.NAME\.frozen"):
        LoadedRun.of(*config(models).resolve(), tmp_path / "run", Two())
    alone = config(models, players={"judge": frozen(models / "guide")})
    assert LoadedRun.of(*alone.resolve(), tmp_path / "run", Ranks()).policies.keys() == {""}


def test_a_player_may_learn_at_a_pace_of_its_own(models: Path, tmp_path: Path):
    still = learns(models, optimiser={"lr": 1e-30})
    train(config(models, updates=1, players={"seeker": still}), tmp_path / "run")
    (line,) = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "rl"]
    assert (line["lr"], line["players/seeker/lr"]) == (1e-2, 1e-30)


def test_players_learn_from_the_teacher_of_the_loop(models: Path, tmp_path: Path):
    found = load_pretrained(models / "guide")
    with torch.no_grad():
        found.model.lm_head.weight.mul_(2.0)
    teacher, run = tmp_path / "teacher", tmp_path / "run"
    found.model.save_pretrained(teacher)
    found.tokenizer.save_pretrained(teacher)
    learn: dict[str, Any] = {"updates": 1, "recipe": "distill", "group_size": 2}
    one = {"seeker": learns(models)}
    with pytest.raises(UsageError, match=r"loop\.teacher=.*\bweights\b"):
        train(config(models, **learn, players=one, teacher=str(models / "seeker")), run)
    assert not run.exists()
    train(config(models, **learn, players=one, teacher=str(teacher)), run)
    (line,) = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "rl"]
    assert line["kl/teacher/k3"] != line["players/seeker/kl/teacher/k3"]
    assert {use.info["teacher"] for own in uses(run).values() for use in own} == {f"{teacher} sha256:{digest(teacher)}"}
    assert len(uses(run)) == 2
    again = reproduce(run)
    assert [again.outcome, *(one.outcome for one in again.players.values())] == ["verified", "verified"]


# Imitation


def test_a_warm_start_imitates_the_agents_that_are_trained_and_no_others(models: Path, tmp_path: Path, capsys):
    play = settings(
        models,
        players={
            "rest": {"agents": [SEEKER, JUDGE], "frozen": True, "engine": {"kind": "scripted", "answers": ["b", "b"]}}
        },
    )
    record = {key: play[key] for key in ("agent", "env", "tasks", "engine")}
    others = {"rest": {key: value for key, value in play["players"]["rest"].items() if key != "frozen"}}
    sampling = {"max_tokens": 1}
    (tmp_path / "run.json").write_text(json.dumps({**record, "players": others, "split": "demo", "sampling": sampling}))
    words = ("run", "--config", str(tmp_path / "run.json"), "--attempts", "2", "--out", str(tmp_path / "tapes"))
    assert answer_of(capsys, *words)["usable"] == 8
    warm = {"tapes": str(tmp_path / "tapes"), "updates": 1, "batch": 8}
    summary = train(TrainConfig.model_validate({**play, "warm": warm}), tmp_path / "run")
    assert summary.books_close
    first = uses(tmp_path / "run")[summary.lineage][0]
    with Store.open(tmp_path / "run") as store:
        by = {(tape.id, call.call): call.by for tape in store.tapes() for call in tape.calls}
    assert len(first.items) == 8
    assert {by[item[0], item[1]] for item in first.items} == {GUIDE}
    nobody = {**play, "warm": warm, "loop": {**play["loop"], "agents": ["pair/nobody"]}}
    with pytest.raises(UnknownAgent, match=r"loop\.agents.*'pair/nobody'"):
        train(TrainConfig.model_validate(nobody), tmp_path / "none")


# Recording


def test_an_episode_of_several_models_is_recorded_and_taken_up_again(models: Path, tmp_path: Path, capsys):
    run = str(tmp_path / "tapes")
    scene = ("--agent", f"{WORLD}:Judged", "--env", f"{EXAMPLE}:Hidden", "--tasks", f"{EXAMPLE}:tasks")
    players = {"seeker": learns(models), "judge": {"agents": [JUDGE], "engine": {"kind": "scripted", "answers": ["c"]}}}
    more = ("--set", f"players={json.dumps(players)}", "--set", "sampling.max_tokens=1")
    words = ("run", *scene, "--model", str(models / "guide"), *more, "--out", run)
    assert answer_of(capsys, *words)["usable"] == 4
    assert answer_of(capsys, *words, "--resume")["recorded"] == 0
    names = {path: digest(models / path.split("/")[1])[:12] + ":0" for path in (GUIDE, SEEKER)}
    assert versions(tmp_path / "tapes") == {GUIDE: {names[GUIDE]}, SEEKER: {names[SEEKER]}, JUDGE: set()}
    assert set(published(tmp_path / "tapes")) == set(names.values())
    with Store.open(run) as store:
        tape = next(iter(store.tapes()))
        assert [call.text for call in tape.calls if call.by == JUDGE] == ["c"]
    said = answer_of(capsys, "replay", "model", run)
    assert {one["outcome"] for one in said["verdicts"]} == {"verified"}
    again = answer_of(capsys, "branch", run, tape.id, "--at", "0")
    assert again["tapes"][0]["status"] == "finished"
    assert versions(tmp_path / "tapes", split="branch")[SEEKER] == {names[SEEKER]}


def test_going_on_from_a_trained_run_asks_for_the_weights_of_each(trained: Path, models: Path, tmp_path: Path, capsys):
    import shutil

    run = shutil.copytree(trained, tmp_path / "run")
    tape = uses(run)[lineages(run)[0]][2].info["tapes"][0]
    assert main(["branch", str(run), tape, "--at", "0"]) == 64
    assert "--model RUN/checkpoints/update-" in capsys.readouterr().err
    model = ("--model", str(run / "checkpoints" / "update-000002" / "hf"))
    assert main(["branch", str(run), tape, "--at", "0", *model]) == 64
    assert "--set players.seeker.engine.model=RUN/checkpoints/seeker/update-" in capsys.readouterr().err
    seeker = ("--set", f"players.seeker.engine.model={run / 'checkpoints' / 'seeker' / 'update-000002' / 'hf'}")
    assert answer_of(capsys, "branch", str(run), tape, "--at", "0", *model, *seeker)["tapes"]
