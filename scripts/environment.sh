# Sourced by the scripts here: a virtual environment with kvkeep in it, made once and reused while nothing has changed.

venv=.venv

# The Python that makes new environments: $PYTHON, else the first of these that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        # A Python that was asked for by name is not passed over.
        [ "$candidate" = "${PYTHON:-}" ] && break
    done
    echo "kvkeep needs Python 3.11 or newer; name one: PYTHON=python3.12 bash $0" >&2
    return 1
}

# Make the environment if it is not there, or was left half made.
make_venv() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    local python
    python=$(find_python)
    echo "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

# A hash of the files and folders that an installation depends on.
hash_of() {
    "$venv/bin/python" - "$@" <<'END'
import hashlib, pathlib, sys

hasher = hashlib.sha256(sys.version.encode())
for name in sys.argv[1:]:
    path = pathlib.Path(name)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and "__pycache__" not in file.parts:
            hasher.update(f"{file}\n".encode() + file.read_bytes())
print(hasher.hexdigest())
END
}

# Whether the environment shows the sources as they are.
is_editable() {
    "$venv/bin/python" - 2>/dev/null <<'END'
import importlib.metadata, json, sys

origin = json.loads(importlib.metadata.distribution("kvkeep").read_text("direct_url.json"))
sys.exit(not origin["dir_info"].get("editable"))
END
}

# For work on kvkeep: editable, with the tools of the group `dev`. $1 is the file of constraints.
install_for_development() {
    # An editable installation knows the modules by name: one that went away would still be looked for.
    local modules
    modules=$(find src -name '*.py' | LC_ALL=C sort | cksum)
    install_once "editable $(hash_of pyproject.toml CMakeLists.txt native "$1") $modules" \
        -c "$1" --group dev -e ".[bench,report,ray,evolve,openevolve,scip]"
}

# install_once STAMP ARGUMENTS...: pip install, unless the same installation was made before.
install_once() {
    local stamp=$1
    shift
    [ "$(cat "$venv/kvkeep.stamp" 2>/dev/null)" = "$stamp" ] && return
    rm -f "$venv/kvkeep.stamp"
    echo "installing into $venv (torch alone is some 200 MB; a first time takes minutes)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "pip>=25.1"  # the first that knows --group
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    echo "$stamp" >"$venv/kvkeep.stamp"
}
