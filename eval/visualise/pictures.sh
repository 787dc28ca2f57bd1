#!/bin/sh
# The pictures and the text of the README's "See it"; run in the project's folder:
#     sh eval/visualise/pictures.sh
set -e
asked="Explain in two sentences how a rainbow forms."
out=eval/results/visualise
selfspec trace "$asked" --pinned --max-new-tokens 20 --rejected \
    --output "$out/rainbow.jsonl" --png "$out/rainbow.png" --overwrite > "$out/rainbow.txt"
selfspec trace "$asked" --pinned --max-new-tokens 20 \
    --heads smollm2-135m-instruct-translator --png "$out/rainbow-translator.png" --overwrite > "$out/rainbow-translator.txt"
