# For tests in a bare Debian 12: sourced by tests/newcomer.sh and tests/debian_package.sh, by bash as root.
#
# make_root      makes $root, a tree by debootstrap (or a copy of $DT_DEBIAN, if that names one), removed when the script ends
# in_root CMD..  runs a command there as root; in_root_as USER SCRIPT runs a shell script as that user
# fail, skip     end the script with a sentence; skip with 77, where the machine lacks what the test needs
#
# Of this machine the tree gets only what it needs to reach the network: the resolver, proxies, and the certificates that pip and others
# are told to trust. Nothing is shared but /proc and /dev, in which terminals are its own.

mirror=${DT_DEBIAN_MIRROR:-http://deb.debian.org/debian}

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

skip() { # what is missing is the machine's, not the project's
    printf '%s: skipped: %s\n' "$(basename "$0")" "$*" >&2
    exit 77
}

drop_root() {
    [ -n "${root:-}" ] || return 0
    # lazily: what a failed test left running may still hold them, and they must be gone before the tree is removed
    umount --lazy "$root/proc" "$root/dev/pts" "$root/dev" "$root/ccache" 2>/dev/null || true
    if grep -q " $root/" /proc/mounts; then # never remove what another file system holds
        printf 'still mounted, so not removed: %s\n' "$root" >&2
    else
        rm -rf "$root"
    fi
}

make_root() {
    [ "$(id -u)" = 0 ] || skip "needs root, for chroot: sudo bash $0"
    command -v debootstrap >/dev/null || skip "debootstrap is missing: apt-get install debootstrap"
    root=$(mktemp -d "${TMPDIR:-/var/tmp}/deeptutor-root-XXXXXX")
    trap drop_root EXIT
    if [ -n "${DT_DEBIAN:-}" ]; then
        cp -a "$DT_DEBIAN/." "$root/"
    else
        debootstrap --variant=minbase bookworm "$root" "$mirror" >"$root/debootstrap.out" 2>&1 ||
            { tail -n 5 "$root/debootstrap.out" >&2; skip "debootstrap failed"; }
    fi
    chmod 755 "$root"
    { mount -t proc proc "$root/proc" && mount --bind /dev "$root/dev" && mount --make-private "$root/dev" &&
        mount -t devpts devpts "$root/dev/pts"; } || skip "nothing can be mounted here"
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    cp -L /etc/hosts "$root/etc/hosts"
    printf 'APT::Get::Assume-Yes "true";\nAPT::Install-Recommends "false";\n' >"$root/etc/apt/apt.conf.d/99test"
    cp /etc/apt/apt.conf.d/*proxy* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
    environment=(HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive)
    for variable in http_proxy https_proxy HTTP_PROXY HTTPS_PROXY no_proxy NO_PROXY PIP_INDEX_URL PIP_DEFAULT_TIMEOUT DT_JOBS; do
        [ -z "${!variable:-}" ] || environment+=("$variable=${!variable}")
    done
    if [ -n "${PIP_CERT:-}" ]; then
        install -m 644 "$PIP_CERT" "$root/etc/pip-cert.pem" # under a name that no package writes anew
        environment+=(PIP_CERT=/etc/pip-cert.pem)
    fi
    if [ -f /etc/pip.conf ]; then
        cp /etc/pip.conf "$root/etc/pip.conf"
    fi
}

in_root() { chroot "$root" env -i "${environment[@]}" "$@"; }

in_root_as() { # <user> <script>
    chroot --userspec "$1" "$root" env -i "${environment[@]}" "HOME=/home/$1" "USER=$1" bash -c "cd && $2"
}
