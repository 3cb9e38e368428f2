# download.sh FROM TO: fetch a model once into the folder TO, whole or not at all.
# Several pods may run it at once: each fetches into a folder of its own, and the first to finish gives it the name TO.
set -eu
from=$1
to=$2
mark=.sglang-ext-download

if [ -e "$to" ]; then
  if [ "$(cat "$to/$mark" 2>/dev/null)" = "$from" ]; then
    echo "$to is there already"
    exit 0
  fi
  echo "$to holds something else than $from; choose another download path, or remove it." >&2
  exit 1
fi

mkdir -p "$(dirname "$to")"
part="$to.part-$(hostname)"
rm -rf "$part"
mkdir "$part"
trap 'rm -rf "$part"' EXIT
trap 'exit 143' TERM INT

case $from in
  hf://*)
    name=${from#hf://}
    revision=${name#*@}
    [ "$revision" != "$name" ] || revision=main
    hf download "${name%@*}" --revision "$revision" --local-dir "$part"
    ;;
  s3://*) aws s3 sync --only-show-errors "$from" "$part" ;;
  oci://*) oras pull --output "$part" "${from#oci://}" ;;
  *)
    echo "$from is neither hf://, s3:// nor oci://." >&2
    exit 1
    ;;
esac

if [ ! -e "$part/config.json" ]; then
  echo "$from brought no config.json, so it is no model." >&2
  exit 1
fi
printf '%s\n' "$from" > "$part/$mark"
if [ -e "$to" ]; then
  echo "another pod was first"
else
  mv "$part" "$to"
fi
echo "$from is at $to"
