# Sourced by demo.sh and test.sh: makes the virtual environment, once, and sets
#   root    the checkout
#   python  the interpreter of the environment
# The environment is .venv in the checkout, or the folder that KVJAX_VENV names. Its file
# kvjax-stamp says what was installed; it is written last, so an interrupted run starts over.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="${KVJAX_VENV:-$root/.venv}"
[[ $venv == /* ]] || venv="$PWD/$venv"
python="$venv/bin/python"
stamp="$venv/kvjax-stamp"

_fail() {
  echo "$1" >&2
  exit 2
}

# What an up-to-date stamp holds: interpreter and checkout on the first line, then setup.cfg.
_wanted_stamp() {
  "$python" -c 'import platform, sys; print(platform.python_version(), sys.argv[1])' "$root" || return
  cat "$root/setup.cfg"
}

# Prints the first Python that is new enough, by running every candidate: a shim on PATH may fail.
_find_python() {
  local name path version found="" broken=""
  for name in python3 python3.14 python3.13 python3.12 python; do
    while read -r path; do
      version="$("$path" -c 'import platform; print(platform.python_version())' 2>/dev/null)" ||
        continue
      if ! "$path" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        [[ $found == *"$version"* ]] || found+="${found:+, }$version"
      elif ! "$path" -c 'import ensurepip, venv' 2>/dev/null; then
        broken="$path ($version)"
      else
        # Not the path: a version manager's shim gives another Python in another folder.
        "$path" -c 'import sys; print(sys.executable)'
        return
      fi
    done < <(type -aP "$name")
  done
  if [[ -n $broken ]]; then
    _fail "kvjax needs Python's venv and pip modules; $broken lacks them; install them (on Debian and Ubuntu: the package python3-venv) and run again"
  fi
  _fail "kvjax needs Python 3.12 or newer; found ${found:-none}; install a newer Python and run again"
}

_create() {
  local base
  if [[ -e $venv && ! -e $stamp && -n "$(ls -A "$venv")" ]]; then
    _fail "$venv was not made by kvjax; move it away, or set KVJAX_VENV to a new folder, and run again"
  fi
  base="$(cd "$root" && _find_python)" || exit
  echo "kvjax: creating $venv with $base"
  rm -rf "$venv"
  mkdir -p "$venv"
  echo "incomplete" >"$stamp"
  "$base" -m venv "$venv" || _fail "kvjax: $base could not create $venv; see above"
}

_install() {
  echo "kvjax: installing kvjax and what it depends on into $venv (once; a minute or two)"
  echo "incomplete" >"$stamp"
  # Wheels only, since the machine may have no compiler; two packages of pure Python have none.
  "$python" -m pip install --disable-pip-version-check --only-binary=:all: \
    --no-binary=jieba,rouge-score -e "$root[test,notebooks,eval]" ||
    _fail "kvjax: the installation failed; see pip's message above, and run again to repair it"
  _wanted_stamp >"$stamp.new"
  mv "$stamp.new" "$stamp"
}

_wanted="$(_wanted_stamp 2>/dev/null || true)"
if [[ -z $_wanted || "$(head -n 1 "$stamp" 2>/dev/null)" != "${_wanted%%$'\n'*}" ]]; then
  _create
  _install
elif [[ "$(cat "$stamp")" != "$_wanted" ]]; then
  _install
fi
unset _wanted
