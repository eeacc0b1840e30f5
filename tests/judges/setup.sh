#!/usr/bin/env bash
# Install the judges: clients of OpenAI's Realtime API that other people wrote, in environments of their own under a folder.
#
#     bash tests/judges/setup.sh [FOLDER]        # .judges by default; name another one in $JUDGES when the judges run
#     apt-get install --no-install-recommends chromium      # for judge_browser.py and judge_page.py
#
# Then, with a server at port 8000 and questions spoken by `python -m tests.judges.questions FOLDER/questions`:
#
#     FOLDER/venv-openai/bin/python tests/judges/judge_openai.py ws://127.0.0.1:8000/v1 KEY FOLDER/questions/*.wav
#
# judge_openai.py, judge_openai_agents.py and judge_browser.py run in venv-openai, judge_pipecat.py in venv-pipecat,
# judge_livekit.py in venv-livekit, and judge_agents.mjs in Node 20 or newer.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/../../.judges}
mkdir -p "$folder/node"
for name in openai pipecat livekit; do
    python3 -m venv "$folder/venv-$name"
    "$folder/venv-$name/bin/pip" install --quiet -r "$here/requirements-$name.txt"
done
cp "$here/package.json" "$folder/node/"
npm install --prefix "$folder/node" --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error
