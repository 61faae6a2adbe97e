#!/bin/sh
# Give all new connections to one service: weights.sh blue|green [FILE]. Called by `zl switch` with traffic = "command":
#   move = ["/opt/zl/share/zl/deploy/traefik/weights.sh", "{name}"]
# Traefik sees a whole file or the old one, never half of it: the new one is renamed into place.
set -eu
name=${1:?blue or green}
file=${2:-/etc/traefik/zl/zl.yml}
grep -q -- "- name: $name\$" "$file" || { echo "weights.sh: $file weighs no service $name" >&2; exit 1; }
new=$(mktemp "$(dirname "$file")/.weights.XXXXXX")
trap 'rm -f "$new"' EXIT
awk -v name="$name" '
  /^ *- name: / { current = $3 }
  /^ *weight: / { sub(/weight: .*/, "weight: " (current == name ? 1 : 0)) }
  { print }
' "$file" >"$new"
chmod --reference="$file" "$new"
mv "$new" "$file"
