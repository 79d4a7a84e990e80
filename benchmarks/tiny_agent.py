"""The agent program of the agents' benchmarks: a shell script that asks its model twice and writes a file.

Needs bash and nothing else: it speaks HTTP by itself, one connection for each call, not streamed. The same script runs
in our sandboxes and in the peers' runtimes. Its argument is the prompt; OPENAI_BASE_URL, OPENAI_API_KEY and
OPENAI_MODEL say whom it asks. What the last answer ends with is its finding, in answer.txt.

Standard library only: it is imported in the peers' own environments too.
"""

from __future__ import annotations

CALLS = 2
FILE = "answer.txt"
SCRIPT = r"""
set -eu
LC_ALL=C
base=${OPENAI_BASE_URL#http://}
place=${base%%/*}
said="{\"role\": \"user\", \"content\": \"$1\"}"
ask() {
  body="{\"model\": \"$OPENAI_MODEL\", \"messages\": [$said]}"
  exec 3<>"/dev/tcp/${place%:*}/${place##*:}"
  printf 'POST /%s/chat/completions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nConnection: close\r\n' \
    "${base#*/}" "$place" "$OPENAI_API_KEY" >&3
  printf 'Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s' "${#body}" "$body" >&3
  IFS= read -r -d '' reply <&3 || true
  exec 3>&-
  case $reply in "HTTP/1.1 200 "*) ;; *) printf '%s\n' "$reply" >&2; exit 3 ;; esac
  answer=${reply#*\"content\":}
  answer=${answer#*\"}
  answer=${answer%%\"*}
}
ask
said="$said, {\"role\": \"assistant\", \"content\": \"$answer\"}, {\"role\": \"user\", \"content\": \"Are you sure?\"}"
ask
printf '%s\n' "${answer##* }" > answer.txt
printf '%s\n' "$answer"
"""
ARGV = ("bash", "-c", SCRIPT, "tiny-agent")
"""Without its argument."""
