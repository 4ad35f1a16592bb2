# The quickstart, and on its model each command of the README.
rl-train --help
rl-train quickstart --steps 10
test -f quickstart/report.html # the PNGs need the extra `plots`
rl-train plan --model quickstart/actor --reference --gpu-gib 80
printf '{"text": "%s", "answer": "1"}\n' a b c d >prompts.jsonl
train=(rl-train train --model quickstart/actor --prompts prompts.jsonl --reward number-match --algorithm grpo
    --max-new-tokens 4 --prompts-per-step 4 --device cpu --out run)
"${train[@]}" --steps 1 --dry-run
"${train[@]}" --steps 1
"${train[@]}" --steps 2 --dims tp=2 # resumes on another grid
rl-train report run 2>&1 | grep "pip install 'matplotlib"
test -f run/report.html
rl-train score --help
