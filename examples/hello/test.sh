#!/usr/bin/env bash
# Checks the greeting of one language: test.sh LANGUAGE
set -euo pipefail
greeting=$(cat "greetings/$1.txt")
[ -n "$greeting" ] || { echo "the greeting is empty" >&2; exit 1; }
[ "$(wc -l < "greetings/$1.txt")" -eq 1 ] || { echo "a greeting is one line" >&2; exit 1; }
echo "ok: $1"
