#!/usr/bin/env bash
# Puts the runsc of gVisor from Debian 13 into the folder $1, by way of the Debian mirror that this
# machine has. It is one static file, so it runs on older releases too.
set -euo pipefail
target=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/lists/partial "$work"/cache/archives/partial
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' | head -1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$work/sources.list"
options=(-qq -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=-
  -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o Acquire::Languages=none
  -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
cd "$work"
apt-get "${options[@]}" download runsc
dpkg-deb --fsys-tarfile runsc_*.deb | tar -xO ./usr/bin/runsc >"$target/runsc.new"
chmod 755 "$target/runsc.new"
mv "$target/runsc.new" "$target/runsc"
