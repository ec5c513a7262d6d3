//! git's tree objects.

/// One entry of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TreeEntry {
    pub name: String,
    /// A regular file: not a folder, a symbolic link or a submodule.
    pub is_file: bool,
    pub oid: String,
}

/// Reads a raw tree: `<mode> <name>\0<binary id>` again and again. `id_len` is 20 for SHA-1, 32 for SHA-256. `None`
/// when the bytes are not that. A name that is not UTF-8 cannot be one of ours and is left out.
pub(super) fn parse(mut raw: &[u8], id_len: usize) -> Option<Vec<TreeEntry>> {
    let mut out = Vec::new();
    while !raw.is_empty() {
        let space = raw.iter().position(|b| *b == b' ')?;
        let end = raw.iter().position(|b| *b == 0)?;
        let (mode, name) = (&raw[..space], raw.get(space + 1..end)?);
        let id = raw.get(end + 1..end + 1 + id_len)?;
        let is_file = matches!(mode, b"100644" | b"100755" | b"100664");
        if let Ok(name) = std::str::from_utf8(name) {
            out.push(TreeEntry { name: name.to_owned(), is_file, oid: hex::encode(id) });
        }
        raw = &raw[end + 1 + id_len..];
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_read_and_broken_ones_refused() {
        let mut raw = b"100644 a b\0".to_vec();
        raw.extend([0xab; 20]);
        raw.extend(b"40000 dir\0");
        raw.extend([1; 20]);
        raw.extend(b"120000 link\0");
        raw.extend([2; 20]);
        let entries = parse(&raw, 20).unwrap();
        let names: Vec<_> = entries.iter().map(|e| (e.name.as_str(), e.is_file)).collect();
        assert_eq!(names, [("a b", true), ("dir", false), ("link", false)]);
        assert_eq!(entries[0].oid, "ab".repeat(20));
        assert_eq!(parse(&[], 20), Some(Vec::new()));
        for cut in 1..raw.len() {
            let whole = [31, 61].contains(&cut);
            assert_eq!(parse(&raw[..cut], 20).is_some(), whole, "{cut}");
        }
    }
}
