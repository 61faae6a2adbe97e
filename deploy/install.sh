#!/usr/bin/env bash
# Install zl into /opt/zl with a virtual environment of its own, with its units; or remove it again.
#
# Each build of zl is a release: releases/VERSION-HASH is a whole environment, `current` names the one in use, and
# bin/zl starts it. A server that runs keeps its release while another is installed. Running this twice changes nothing.
set -euo pipefail
umask 022

usage() {
  cat <<'TEXT'
usage: install.sh [options] [-- PIP-OPTIONS]
  --prefix DIR       where zl lives (default /opt/zl)
  --root DIR         install below DIR as if it were /: nothing outside is written, no user made, no daemon told
  --wheel FILE       install this wheel (default: build one from the folder that this script comes from)
  --python PROGRAM   Python 3.11 to 3.13 (default python3)
  --cuda, --no-cuda  with what a GPU needs (default: where a GPU driver is loaded)
  --uninstall        remove it; /etc/zl, /var/lib/zl, /var/cache/zl and /var/log/zl stay
  --purge            with --uninstall: these too; also after an --uninstall that left them
Options after -- go to pip, for example: -- --no-index --find-links ./wheels
TEXT
}

die() { echo "install.sh: $*" >&2; exit 1; }
say() { echo "zl: $*"; }

prefix=/opt/zl root='' wheel='' python=python3 uninstall='' purge='' cuda=''
while [ $# -gt 0 ]; do
  case $1 in
    --prefix | --root | --wheel | --python)
      [ $# -ge 2 ] || die "$1 needs a value"
      declare "${1#--}=$2"
      shift 2 ;;
    --cuda) cuda=yes; shift ;;
    --no-cuda) cuda=no; shift ;;
    --uninstall) uninstall=yes; shift ;;
    --purge) purge=yes; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) die "unknown option $1; --help lists them" ;;
  esac
done
pip_options=("$@")
[[ $prefix == /?* && $prefix != *..* ]] || die "--prefix $prefix: must be an absolute path other than /"
prefix=${prefix%/}
if [ -n "$root" ]; then
  root=$(realpath -m "$root")
  [ "$root" != / ] || root=''
fi
at=$root$prefix
manifest=$at/share/zl/manifest
units=/usr/local/lib/systemd/system
script=$(realpath "$0")
source=$(dirname "$(dirname "$script")")

purge() {
  rm -rf -- "$root"/etc/zl "$root"/var/lib/zl "$root"/var/cache/zl "$root"/var/log/zl
  if [ -z "$root" ] && getent passwd zl >/dev/null; then userdel zl || true; fi
}

remove() {
  if [ ! -f "$manifest" ]; then
    link=$root/usr/local/bin/zl
    if [ -L "$link" ]; then
      other=$(dirname "$(dirname "$(readlink -m "$link")")")
      die "nothing is installed at $at, but $link leads to $other: --prefix ${other#"$root"}"
    fi
    [ -n "$purge" ] || die "nothing that this script installed is at $at; --prefix names another place"
    [ ! -e "$root$units/zl.service" ] || die "$units/zl.service was not installed by this script: remove what uses /etc/zl first"
    purge
    say "removed what an earlier --uninstall left"
    return
  fi
  if [ -z "$root" ] && [ -d /run/systemd/system ]; then
    names=$(sed -n "s,^$units/,,p" "$manifest" | grep -v '@' || true)
    running=$(systemctl list-units --plain --no-legend 'zl@*' | cut -d' ' -f1 || true)
    # shellcheck disable=SC2086
    systemctl disable --now $names $running 2>/dev/null || true
  fi
  # Links of enabled units, instances too, where no systemd runs that could be told: an image, a container.
  for link in "$root"/etc/systemd/system/*.wants/zl*; do
    case $(readlink "$link" || true) in "$units"/*) rm -f -- "$link" ;; esac
  done
  while read -r path; do
    rm -f -- "$root$path"
  done <"$manifest"
  rm -rf -- "$at/releases" "$at/current" "$at/share"
  rmdir --ignore-fail-on-non-empty -- "$at/bin" "$at"
  [ -z "$purge" ] || purge
  if [ -z "$root" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
  say "removed from $at"
}

if [ -n "$uninstall" ]; then
  remove
  exit 0
fi
[ -z "$purge" ] || die "--purge goes with --uninstall"

# -- what to install ---------------------------------------------------------------------------------------------------

version=$("$python" -c 'import ensurepip, sys; print("%d.%d" % sys.version_info[:2])') ||
  die "$python: needs the venv module: apt install python3-venv"
case $version in 3.11 | 3.12 | 3.13) ;; *) die "$python is Python $version; zl needs 3.11 to 3.13: --python PROGRAM" ;; esac
# What is given is looked at before anything is made.
if [ -n "$wheel" ]; then
  [ -f "$wheel" ] || die "--wheel $wheel: no such file"
  [[ ${wheel##*/} == zl-*-py3-none-any.whl ]] || die "--wheel $wheel: no wheel of zl"
else
  [ -f "$source/pyproject.toml" ] || die "$source: no source of zl here; give --wheel FILE"
fi
mkdir -p "$at" 2>/dev/null && [ -w "$at" ] || die "$at cannot be written: run as root, or give --root or --prefix"
exec 9<"$at"
flock -n 9 || die "$at: another install.sh is at work"
scratch=$(mktemp -d "$at/.install.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
export TMPDIR=$scratch PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
[ -z "$root" ] || export PIP_NO_CACHE_DIR=1

if [ -z "$cuda" ]; then
  if [ -e /proc/driver/nvidia/version ]; then cuda=yes; else cuda=no; fi
fi
constraints=()
if [ "$cuda" = no ] && [ -f "$source/constraints/cpu.txt" ]; then constraints=(-c "$source/constraints/cpu.txt"); fi

if [ -z "$wheel" ]; then
  say "building a wheel"
  mkdir "$scratch/source" "$scratch/wheel"
  tar -C "$source" -c --exclude=.git --exclude='.venv*' --exclude=build --exclude='*.egg-info' --exclude=__pycache__ \
    pyproject.toml README.md LICENSE zl | tar -C "$scratch/source" -x
  "$python" -m venv "$scratch/maker"
  SOURCE_DATE_EPOCH=946684800 "$scratch/maker/bin/pip" wheel --quiet --no-deps -w "$scratch/wheel" "$scratch/source"
  wheel=$(echo "$scratch"/wheel/zl-*.whl)
fi
release=$(basename "$wheel" | cut -d- -f2)
hash=$({ sha256sum <"$wheel"; cat "${constraints[@]:1}" /dev/null; echo "$version $cuda ${pip_options[*]-}"; } | sha256sum)
release=$release-${hash:0:12}

# -- the environment ---------------------------------------------------------------------------------------------------

home=$at/releases/$release
if [ -f "$home/.complete" ]; then
  say "release $release is there"
else
  say "making release $release"
  rm -rf "$home"
  mkdir -p "$at/releases"
  "$python" -m venv "$home"
  extra=''
  [ "$cuda" = no ] || extra='[cuda]'
  "$home/bin/python" -m pip install --quiet "${constraints[@]}" "${pip_options[@]}" "$(realpath "$wheel")$extra"
  "$home/bin/python" -I -m zl --version >/dev/null || die "$home: the installed zl does not start"
  touch "$home/.complete"
fi
before=$(readlink "$at/current" || true)
if [ "$before" != "releases/$release" ]; then
  ln -s "releases/$release" "$scratch/current"
  mv -T "$scratch/current" "$at/current"
  for old in "$at"/releases/*; do # the one before stays, for a way back: ln -sfn releases/OLD current
    case releases/${old##*/} in "$before" | "releases/$release") continue ;; esac
    grep -qsz "^$old/bin/python\$" /proc/[0-9]*/cmdline || rm -rf -- "$old" # unless a server runs from it
  done
fi

# -- files -------------------------------------------------------------------------------------------------------------

new=$scratch/manifest
put() { # SOURCE DESTINATION MODE: names of this prefix are written into it
  sed "s,/opt/zl/,$prefix/,g" "$1" >"$scratch/file"
  cmp -s "$scratch/file" "$root$2" || install -D -m "$3" "$scratch/file" "$root$2"
  echo "$2" >>"$new"
}

cat >"$scratch/zl" <<'TEXT'
#!/bin/sh
# Start the release in use. It is named by its own path, so that a server keeps it when `current` moves on.
here=$(dirname "$(readlink -f "$0")")
exec "$(readlink -f "$here/../current")/bin/python" -I -m zl "$@"
TEXT
put "$scratch/zl" "$prefix/bin/zl" 755
[ "$script" = "$at/share/zl/install.sh" ] || install -D -m 755 "$script" "$at/share/zl/install.sh"
echo "$prefix/share/zl/install.sh" >>"$new"
mkdir -p "$root/usr/local/bin"
[ "$(readlink -f "$root/usr/local/bin/zl")" = "$at/bin/zl" ] || ln -sfnr "$at/bin/zl" "$root/usr/local/bin/zl"
echo /usr/local/bin/zl >>"$new"

shopt -s nullglob globstar
for file in "$source"/systemd/*; do
  case ${file##*/} in
    *.service | *.socket | *.target | *.timer | *.path) put "$file" "$units/${file##*/}" 644 ;;
    *.sysusers) put "$file" "/usr/local/lib/sysusers.d/$(basename "$file" .sysusers).conf" 644 ;;
    *.tmpfiles) put "$file" "/usr/local/lib/tmpfiles.d/$(basename "$file" .tmpfiles).conf" 644 ;;
    zl.toml) # the administrator's from the first day on: never overwritten
      put "$file" "$prefix/share/zl/zl.toml" 644
      [ -e "$root/etc/zl/zl.toml" ] || install -D -m 640 "$file" "$root/etc/zl/zl.toml" ;;
    *) put "$file" "$prefix/share/zl/systemd/${file##*/}" 644 ;;
  esac
done
for file in "$source"/deploy/**/*; do
  if [ -f "$file" ] && [ "$file" != "$source/deploy/install.sh" ]; then
    put "$file" "$prefix/share/zl/deploy/${file#"$source/deploy/"}" "$(stat -c %a "$file")"
  fi
done
for file in "$source"/docs/*.md; do put "$file" "$prefix/share/doc/zl/${file##*/}" 644; done

if [ -f "$manifest" ]; then # what an older release had and this one has not
  grep -vxFf "$new" "$manifest" | while read -r path; do rm -f -- "$root$path"; done || true
fi
install -D -m 644 "$new" "$manifest"

# -- the system --------------------------------------------------------------------------------------------------------

if [ -n "$root" ]; then
  say "installed below $at"
  exit 0
fi
# The user and the folders need no running systemd, only its programs: an image that is built has these too.
made=yes
if command -v systemd-sysusers >/dev/null && command -v systemd-tmpfiles >/dev/null; then
  systemd-sysusers zl.conf
  systemd-tmpfiles --create zl.conf
  if getent group zl >/dev/null && [ -f /etc/zl/zl.toml ]; then chgrp zl /etc/zl/zl.toml; fi
else
  made=''
fi
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  say "installed; next: edit /etc/zl/zl.toml, then systemctl enable --now zl.socket zl.service"
elif [ -n "$made" ]; then
  say "installed in $at; systemd does not run here: the user zl and its folders are made, no unit is started"
else
  say "installed in $at; systemd is not here: make the user zl and the folders of /usr/local/lib/tmpfiles.d/zl.conf yourself"
fi
