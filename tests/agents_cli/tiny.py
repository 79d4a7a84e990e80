"""Tiny agent programs: ask their model over chat completions, do some work, print what was said.

`tiny` runs the commands that come back, started as `python3 -c SOURCE MODE MARK`; the modes are ways to misbehave.
`shell` is a shell alone: two calls, then a script of the test's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

THIS = f"# of {os.getpid()}.{time.monotonic_ns()}\n"
"""In the command line of every agent of this process, and of nobody else's."""
SOURCE = (
    THIS
    + r"""
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
    print("thinking", file=sys.stderr, flush=True)
    subprocess.run(["sleep", (sys.argv[2:3] or ["600"])[0]])
if mode == "quits":
    print("no idea what to do", file=sys.stderr)
    sys.exit(0)
def post(path, body):
    try:
        urllib.request.urlopen(urllib.request.Request(url + path, body, {"content-type": "application/json"}))
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode(), file=sys.stderr)
        sys.exit(4)
if mode == "stranger":
    post("/chat/completions", json.dumps({"model": "gpt-somebody-else", "messages": said}).encode())
if mode == "foreigner":
    post("/complete", json.dumps({"model": model, "prompt": prompt}).encode())
if mode == "mumbler":
    post("/chat/completions", b'{"model": ')
if mode == "giant":
    post("/chat/completions", b" " * (33 << 20))
def stream():  # a process that would outlive the agent's group begins with its first piece
    body = json.dumps({"model": model, "messages": said, "stream": True}).encode()
    text = ""
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body), timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[6:])
            if "error" in data:
                print(json.dumps({"type": "error", "message": json.dumps(data)}), flush=True)
                sys.exit(3)
            for choice in data["choices"]:
                if not text and len(sys.argv) > 2:
                    subprocess.Popen(["sleep", sys.argv[2]], start_new_session=True)
                text += choice["delta"].get("content") or ""
    return text
if mode == "stream":
    text = stream()
    open("out.txt", "w").write("forty-two")
    print(json.dumps({"type": "result", "text": text}))
    sys.exit(0)
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
    if mode == "bomb":
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
            except OSError:
                time.sleep(0.01)
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
print(json.dumps({"type": "result", "text": message["content"], "in": used[0], "out": used[1]}), flush=True)
if mode == "lingers":
    subprocess.run(["sleep", sys.argv[2]])
sys.exit(0)
"""
)
SHELL = (
    THIS
    + r"""
rest=${URL#http://}; at=${rest%%/*}; path=/${rest#*/}
ask() {
  exec 3<>"/dev/tcp/${at%:*}/${at#*:}" || exit 3
  body='{"model":"'$MODEL'","messages":['$1']}'
  head="host: proxy\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: ${#body}"
  printf "POST $path/chat/completions HTTP/1.1\r\n$head\r\n\r\n%s" "$body" >&3
  read -r version status said <&3
  [ "$status" = 200 ] || exit 4
  while read -r said <&3; do :; done
  exec 3>&-
}
user='{"role":"user","content":"Go on."}'
ask "$user"
ask "$user"',{"role":"assistant","content":"Done."},'"$user"
eval "$1"
"""
)

OPTIONS = {
    "env": {"URL": "{url}/v1", "MODEL": "{model}"},
    "events": {
        "final": {"when": {"type": "result"}, "take": "text"},
        "failed": {"when": {"type": "error"}, "take": "message"},
        "prompt_tokens": {"when": {"type": "result"}, "take": "in"},
        "completion_tokens": {"when": {"type": "result"}, "take": "out"},
    },
}


def tiny(mode: str = "well", mark: str = "", **more: object) -> dict[str, object]:
    """`agent_options` of the agent `command` that run it. `mark`: seconds that its own children sleep."""
    return {"argv": ["python3", "-c", SOURCE, mode, *([mark] if mark else [])], **OPTIONS, **more}


def shell(script: str, **more: object) -> dict[str, object]:
    """The same for the shell: two model calls, then the script. Its final answer is the model's."""
    return {"argv": ["bash", "-c", SHELL, "shell", script], "env": OPTIONS["env"], **more}


def left() -> list[str]:
    """Command lines of the agents, wherever they run."""
    return [line[:80] for _, line in processes(THIS)]


def agents() -> list[int]:
    """The agents themselves, without what starts them."""
    return [pid for pid, line in processes(THIS) if line.startswith(("python3\0-c\0", "bash\0-c\0"))]


def processes(mark: str) -> list[tuple[int, str]]:
    """(pid, command line) of those that have this in it."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if mark in line and int(pid) != os.getpid():
            found.append((int(pid), line))
    return found
