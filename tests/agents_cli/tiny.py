"""A tiny agent program: asks its model over chat completions, runs the commands that come back, prints what was said.

It is started as `python3 -c SOURCE MODE`; the modes are ways to misbehave.
"""

from __future__ import annotations

import os
from pathlib import Path

SOURCE = r"""
import json, os, signal, subprocess, sys, time, urllib.request
mode = sys.argv[1] if len(sys.argv) > 1 else "well"
url, model, prompt = os.environ["URL"], os.environ["MODEL"], sys.stdin.read()
tool = {"type": "function", "function": {"name": "shell", "description": "", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
said = [{"role": "user", "content": prompt}]
used = [0, 0]
def ask(url=url, model=model, **more):
    body = json.dumps({"model": model, "messages": said, "tools": [tool], **more}).encode()
    asked = urllib.request.Request(url + "/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        data = json.load(answer)
    used[0] += data["usage"]["prompt_tokens"]
    used[1] += data["usage"]["completion_tokens"]
    said.append(data["choices"][0]["message"])
    return said[-1]
if mode == "silent":
    print("thinking", file=sys.stderr)
    time.sleep(600)
if mode == "quits":
    print("no idea what to do", file=sys.stderr)
    sys.exit(0)
if mode == "stranger":
    try:
        ask(model="gpt-somebody-else")
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode(), file=sys.stderr)
        sys.exit(4)
if mode == "intruder":
    try:
        ask(url.rsplit("/", 1)[0] + "/" + "0" * 32)
    except urllib.error.HTTPError as error:
        print("refused", error.code, file=sys.stderr)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        message = ask()
    except urllib.error.HTTPError as error:
        print(json.dumps({"type": "error", "message": error.read().decode()}), flush=True)
        sys.exit(3)
    if mode == "crash":
        os.abort()
    if mode == "stubborn":
        if os.fork() == 0:
            os.setsid()
        while True:
            time.sleep(1)
    if mode == "glutton":
        hoard = [bytearray(2**20) for _ in range(2000)]
    if mode == "flood":
        for _ in range(400):
            os.write(1, b"x" * 65536)
        print()
    calls = message.get("tool_calls") or []
    if not calls:
        break
    for call in calls:
        done = subprocess.run(["sh", "-c", json.loads(call["function"]["arguments"])["command"]],
                              capture_output=True, text=True)
        said.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
print(json.dumps({"type": "result", "text": message["content"], "in": used[0], "out": used[1]}))
sys.exit(0)
"""

OPTIONS = {
    "env": {"URL": "{url}/v1", "MODEL": "{model}"},
    "events": {
        "final": {"when": {"type": "result"}, "take": "text"},
        "failed": {"when": {"type": "error"}, "take": "message"},
        "prompt_tokens": {"when": {"type": "result"}, "take": "in"},
        "completion_tokens": {"when": {"type": "result"}, "take": "out"},
    },
}


def tiny(mode: str = "well", **more: object) -> dict[str, object]:
    """`agent_options` of the agent `command` that run it."""
    return {"argv": ["python3", "-c", SOURCE, mode], **OPTIONS, **more}


def left() -> list[str]:
    """Processes of the tiny agent, wherever they run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if SOURCE[:60] in line:
            found.append(line[:80])
    return found
