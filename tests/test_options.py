"""The config from TOML and flags: what wins, how model flags are taken apart, and how mistakes are told."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.config import ModelSpec, RunConfig
from rollout_engine.errors import InputError
from rollout_engine.modelflags import KINDS, parse_model, scalar
from rollout_engine.options import load_config, load_run
from rollout_engine.sandboxes import check_options
from rollout_engine.toml import key_lines

FILE = """\
k = 8
tasks = "tasks.jsonl"

[models.strong]
kind = "openai"
model = "gpt-x"
base_url = "https://host/v1"
temperature = 0.7
api_key_env = "STRONG_KEY"

[models."gpt-4.1"]   # a name with a dot
kind = "scripted"
options = {skill = 0.5, latency_ms = 50}

[limits]
agent_s = 60

[environments.web]
image = "web:1"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def models(*flags: str, path: Path | None = None) -> dict[str, dict[str, Any]]:
    config = load_config(path, {}, flags)
    return {model.name: model.model_dump(exclude_defaults=True, exclude={"name"}) for model in config.models}


def refusal(text: str, tmp_path: Path, *flags: str, **overrides: Any) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_run(path, overrides, flags)
    return str(caught.value).replace(str(path), "run.toml")


class TestFile:
    def test_a_file_becomes_a_config(self, file: Path) -> None:
        run = load_run(file)
        assert (run.config.k, run.config.limits.agent_s, run.tasks, run.run_dir) == (8, 60.0, "tasks.jsonl", None)
        assert run.config.model_names == ("strong", "gpt-4.1")
        assert run.config.models[1].options == {"skill": 0.5, "latency_ms": 50}
        assert run.config.environment("web:2").image == "web:1"

    def test_no_file_is_the_defaults(self) -> None:
        assert load_config() == RunConfig()
        assert load_config(None, {"k": None, "limits.agent_s": None}, []) == RunConfig()

    def test_flags_win_over_the_file(self, file: Path) -> None:
        overrides = {"k": 2, "limits.agent_s": 5, "agent": None, "run_dir": "runs/a", "tasks": "other.jsonl"}
        run = load_run(file, overrides)
        assert (run.config.k, run.config.limits.agent_s, run.config.agent) == (2, 5.0, "single_turn")
        assert (run.tasks, run.run_dir) == ("other.jsonl", "runs/a")
        assert load_run(file, {"limits.verify_s": 7}).config.limits.agent_s == 60

    def test_a_model_may_be_one_string(self, tmp_path: Path) -> None:
        path = tmp_path / "run.toml"
        path.write_text('[models]\na = "openai:m@http://h/v1"\nb = "scripted:skill=0.1"\n')
        assert load_config(path).model_names == ("a", "b")
        assert load_config(path).models[0].base_url == "http://h/v1"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("k = \n", ["run.toml:1:5: this is no TOML"]),
            ("k = 1\nk = 2\n", ["run.toml:2:", "overwrite"]),
            ("kk = 1", ["run.toml:1: field 'kk': unknown field"]),
            ("\n[limit]\nagent_s = 1", ["run.toml:2: field 'limit': unknown field", "did you mean 'limits'"]),
            ("[limits]\n\nagents_s = 1", ["run.toml:3: field 'limits.agents_s': unknown", "did you mean 'agent_s'"]),
            ("[limits]\nagent_s = 'long'", ["run.toml:2: field 'limits.agent_s': must be a number, found 'long'"]),
            ("limits.agent_s = 0", ["run.toml:1: field 'limits.agent_s': must be greater than 0, found 0"]),
            ("limits = {agent_s = 0}", ["run.toml:1: field 'limits.agent_s': must be greater than 0"]),
            ("limits = 5", ["run.toml:1: field 'limits': must be an object, found 5"]),
            ("k = 2.5", ["run.toml:1: field 'k': must be a whole number, found 2.5"]),
            ("sandbox = 'dokcer'", ["run.toml:1: field 'sandbox': must be one of 'auto', 'namespace'"]),
            ("models = 5", ["run.toml:1: field 'models': models must be tables", "[models.NAME]"]),
            ("[[models]]\nname = 'a'", ["run.toml:1: field 'models': models must be tables"]),
            ("[models]\na = 5", ["run.toml:2: field 'models.a': a model must be a table"]),
            ("[models.a]\nmodel = 'x'", ["run.toml:1: field 'models.a.kind': a required field is missing"]),
            (
                "[models.a]\nkind = 'opnai'",
                ["run.toml:2: field 'models.a.kind': unknown kind of model 'opnai'", "openai"],
            ),
            ("[models.a]\nname = 'b'", ["run.toml:2: field 'models.a.name': unknown field"]),
            ("[models.'a b']\nkind = 'scripted'", ["run.toml:1: field 'models.a b': 'a b' is no name of a model"]),
            ("[models.'a.b']\nkind = 'scripted'\ntemp = 1", ["""run.toml:3: field 'models."a.b".temp'"""]),
            ("[environments.x]\nmemory = 1", ["run.toml:2: field 'environments.x.memory': unknown field", "memory_mb"]),
            ("tasks = 5", ["run.toml:1: field 'tasks': must be text, found 5"]),
            ("[rewards]\npolicy = 'x'\n[models.a]\nkind='scripted'", ["run.toml: rewards.policy 'x' is none of"]),
            ("k = 0\nseed = 'x'", ["run.toml:1: field 'k'", "\nrun.toml:2: field 'seed'", "(2 problems)"]),
        ],
    )
    def test_mistakes_name_line_and_field(self, tmp_path: Path, text: str, said: list[str]) -> None:
        message = refusal(text, tmp_path)
        for part in said:
            assert part in message

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"none\.toml: cannot be read: No such file"):
            load_config(tmp_path / "none.toml")
        (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
        with pytest.raises(InputError, match=r"binary\.toml: this is no UTF-8"):
            load_config(tmp_path / "binary.toml")

    def test_an_override_that_does_not_fit_is_named(self, tmp_path: Path) -> None:
        assert "option 'k': must be greater than 0, found 0" in refusal("k = 8", tmp_path, k=0)


class TestModelFlags:
    def test_kinds(self) -> None:
        assert models("a=openai:gpt-x@https://host/v1", "b=replay:runs/a:b.jsonl", "c=scripted:", "d=scripted") == {
            "a": {"kind": "openai", "model": "gpt-x", "base_url": "https://host/v1"},
            "b": {"kind": "replay", "file": "runs/a:b.jsonl"},
            "c": {"kind": "scripted"},
            "d": {"kind": "scripted"},
        }
        own = "rollout_engine.models:make_client"
        assert models(f"a={own}") == {"a": {"kind": own}}

    @given(st.text(min_size=1), st.sampled_from(["http://127.0.0.1:8000/v1", "https://h.example/openai/v1?a=b:c@d"]))
    def test_an_openai_model_may_have_any_name(self, name: str, url: str) -> None:
        assert parse_model(f"openai:{name}@{url}", "") == {"kind": "openai", "model": name, "base_url": url}

    def test_names_that_look_like_urls(self) -> None:
        for name in ("org/m:free@2024", "a@httpx", "m@http://old/v1", "@", "accounts/x/models/y#z=1"):
            assert models(f"a=openai:{name}@http://h/v1")["a"]["model"] == name

    def test_scripted_options_have_types(self) -> None:
        flag = "a=scripted:skill=0.7,latency_ms=50,stream=true,fault=none, shift = -1e-3"
        options = {"skill": 0.7, "latency_ms": 50, "stream": True, "fault": "none", "shift": -1e-3}
        assert models(flag)["a"]["options"] == options

    @given(st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans())
    def test_scalars_come_back(self, value: float | bool) -> None:
        written = str(value).lower() if isinstance(value, bool) else repr(value)
        assert scalar(written) == value
        assert type(scalar(written)) is type(value)

    @given(st.text())
    def test_any_flag_is_taken_or_refused_in_words(self, text: str) -> None:
        for flag in (text, f"a={text}", f"a.{text}", f"a=openai:{text}", f"a=scripted:{text}"):
            with suppress(InputError):
                load_config(None, {}, ["a=scripted:", flag])

    def test_fields_are_set_in_any_order(self) -> None:
        flags = ("a.temperature=0.5", "a.max_tokens=9", "a.stop=END", "a=openai:m@http://h/v1", "a.seed_header=true")
        more = ("a.extra_body.top_k=5", 'a.options={"x": 1}', "a.options.y=two", "a.call_timeout_s=3")
        found = models(*flags, *more)["a"]
        assert (found["temperature"], found["max_tokens"], found["call_timeout_s"]) == (0.5, 9, 3)
        assert (found["stop"], found["seed_header"]) == (("END",), True)
        assert (found["extra_body"], found["options"]) == ({"top_k": 5}, {"x": 1, "y": "two"})
        assert models("a=scripted:", 'a.stop=["x", "y"]')["a"]["stop"] == ("x", "y")

    def test_names_with_dots(self) -> None:
        found = models("gpt-4.1=scripted:skill=1", "gpt-4.1.temperature=0.2", "gpt-4.1.options.skill=0")
        assert found == {"gpt-4.1": {"kind": "scripted", "temperature": 0.2, "options": {"skill": 0}}}

    def test_a_flag_extends_the_models_of_the_file(self, file: Path) -> None:
        found = models("gpt-4.1=scripted:skill=0.9", "new=scripted:", "strong=openai:gpt-y@http://h/v1", path=file)
        assert list(found) == ["strong", "gpt-4.1", "new"]
        assert found["gpt-4.1"]["options"] == {"skill": 0.9, "latency_ms": 50}
        assert found["strong"] == {
            "kind": "openai",
            "model": "gpt-y",
            "base_url": "http://h/v1",
            "temperature": 0.7,
            "api_key_env": "STRONG_KEY",
        }

    def test_a_flag_of_another_kind_drops_what_belonged_to_the_old_one(self, file: Path) -> None:
        assert models("strong=scripted:skill=1", path=file)["strong"] == {
            "kind": "scripted",
            "options": {"skill": 1},
            "temperature": 0.7,
        }

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["openai:m@http://h"], ["-m openai:m@http://h: a model needs a name and a kind", "-m strong=openai:"]),
            (["=scripted:"], ["'' is no name of a model"]),
            (["a b=scripted:"], ["'a b' is no name of a model"]),
            (["a=opnai:m@http://h"], ["-m a=opnai:m@http://h: unknown kind of model 'opnai'", "did you mean 'openai'"]),
            (["a=opnai:m"], ["unknown kind of model 'opnai'", "did you mean 'openai'"]),
            (
                ["a=gpt-4"],
                [
                    "unknown kind of model 'gpt-4'",
                    "known: openai, responses, anthropic, gemini, replay, scripted, or module:attribute",
                ],
            ),
            (["a="], ["unknown kind of model ''"]),
            (["a=openai:"], ["the model's name at its server is missing", "openai:MODEL@URL"]),
            (["a=openai:@http://h/v1"], ["the model's name at its server is missing"]),
            (["a=replay:"], ["the file of answers is missing"]),
            (["a=scripted:skill"], ["'skill' is no OPTION=VALUE"]),
            (["a=scripted:skill=1,skill=2"], ["'skill' is given twice"]),
            (["a=scripted:", "a=scripted:"], ["the model 'a' is given twice"]),
            (["a=scripted:", "b.seed=1"], ["-m b.seed=1: there is no model 'b'", "models: a"]),
            (["a=scripted:", "a.temprature=1"], ["a model has no field 'temprature'", "did you mean 'temperature'"]),
            (["a=scripted:", "a.temperature=hot"], ["-m a.temperature=hot: must be a number, found 'hot'"]),
            (["a=scripted:", "a.max_tokens=0"], ["-m a.max_tokens=0: must be greater than 0, found '0'"]),
            (["a=scripted:", "a.stop=[1"], ["-m a.stop=[1: this is no JSON"]),
            (["a=scripted:", "a.options=5"], ["-m a.options=5: must be an object, found '5'"]),
        ],
    )
    def test_mistakes_name_the_flag(self, tmp_path: Path, flags: list[str], said: list[str]) -> None:
        message = refusal("", tmp_path, *flags)
        assert message.startswith("-m ")
        for part in said:
            assert part in message


class TestKeyLines:
    def test_tables_and_keys(self) -> None:
        lines = key_lines(FILE)
        assert lines["k",] == 1
        assert lines["models", "strong"] == 4
        assert lines["models", "gpt-4.1"] == 11
        assert lines["models", "gpt-4.1", "options"] == 13

    def test_what_looks_like_a_key_and_is_none(self) -> None:
        text = 'a = """\nb = 1\n[c]\n"""\nlist = [\n  "d = 1",\n  [1],\n]\n# e = 1\nf.g = 1\n[[h]]\ni = 1\n'
        tomllib.loads(text)
        expected = {("a",): 1, ("list",): 5, ("f",): 10, ("f", "g"): 10, ("h",): 11, ("h", "i"): 12}
        assert key_lines(text) == expected

    @given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters='"\\', min_codepoint=32), min_size=1)))
    def test_every_quoted_key_is_found(self, keys: list[str]) -> None:
        keys = [key for key in dict.fromkeys(keys) if key.isprintable()]
        text = "".join(f'"{key}" = {number}\n' for number, key in enumerate(keys, 1))
        assert key_lines(text) == {(key,): number for key, number in tomllib.loads(text).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kinds_are_those_of_the_config(kind: str) -> None:
    ModelSpec(name="a", kind=kind)
    with pytest.raises(ValueError, match=f"{kind!r}"):
        ModelSpec(name="a", kind="other")


def test_every_field_of_a_model_can_be_set_by_a_flag() -> None:
    values = {"kind": "scripted", "stop": "x", "options": "{}", "extra_body": "{}", "logprobs": "true"}
    values |= {"adaptive": "{}", "max_concurrency": "auto"}
    flags = [f"a.{field}={values.get(field, '1')}" for field in ModelSpec.model_fields if field != "name"]
    assert load_config(None, {}, ["a=scripted:", *flags]).models[0].temperature == 1.0


def test_a_backend_s_options_are_checked_without_making_it() -> None:
    check_options({"docker": {"image": "a", "runtime": "runsc"}, "namespace": {}})
    for settings, said in (
        ({"docker": {"runtim": "runsc"}}, "unexpected keyword argument 'runtim'"),
        ({"docker": {"epoch": 3}}, "the engine's own"),
        ({"dokcer": {}}, "did you mean 'docker'"),
    ):
        with pytest.raises(InputError) as caught:
            check_options(settings)
        assert said in str(caught.value)
