#!/usr/bin/env bash
# Make sure that the etcd server binary is there. Installs Debian's package when run as root; otherwise says how.
set -euo pipefail
command -v etcd >/dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "== installing etcd (Debian package etcd-server)"
  log="$(mktemp)"
  if { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends etcd-server; } >"$log" 2>&1
  then rm -f "$log"; exit 0; fi
  tail -n 15 "$log" >&2
fi
echo "error: etcd is not installed." >&2
echo "hint: sudo apt-get install etcd-server   (or put the etcd binary of https://etcd.io on PATH)" >&2
exit 1
