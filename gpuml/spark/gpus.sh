#!/bin/sh
# What nvidia-smi lists -> the JSON that Spark's discoveryScript must print: {"name":"gpu","addresses":["0","1"]}
#
# A GPU's address is its index. A GPU cut into MIG devices gives their names instead ("MIG-..."): CUDA cannot use
# the parent as a whole. No driver or no GPU is an empty list and exit status 0, with the reason on stderr, which
# Spark copies to its log; the script in Spark's examples prints [""] there, one address that is no GPU.

addresses=
whole= # the index of the last GPU seen, as long as no MIG device has followed it

add() {
    if [ -n "$1" ]; then addresses="$addresses${addresses:+,}\"$1\""; fi
}

if ! list=$(nvidia-smi -L 2>&1); then
    echo "gpus.sh: no GPUs, because 'nvidia-smi -L' failed: $list" >&2
    list=
fi

# A here-document, not a pipe: a pipe would run the loop in a subshell and lose the variables.
while IFS= read -r line; do
    name=${line##*(UUID: }
    name=${name%%)*}
    case $line in
    "GPU "[0-9]*": "*"(UUID: GPU-"*)
        add "$whole"
        whole=${line#GPU }
        whole=${whole%%:*}
        ;;
    *" MIG "*"(UUID: MIG-"*)
        whole=
        add "$name"
        ;;
    esac
done <<END
$list
END
add "$whole"

printf '{"name":"gpu","addresses":[%s]}\n' "$addresses"
