#!/usr/bin/env bash
# Greets: greet.sh LANGUAGE VERSION
set -euo pipefail
echo "$(cat "greetings/$1.txt") from hello $2"
