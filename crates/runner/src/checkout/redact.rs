//! What git says may quote what it was given: none of that goes into a message.

/// `text` without user and password of URLs, values of `Authorization` headers, and paths of private keys.
pub(super) fn redacted(text: &str) -> String {
    let mut out: Vec<String> = Vec::new();
    let mut hide = 0_u8;
    for word in text.split(' ') {
        let lower = word.to_ascii_lowercase();
        if hide > 0 {
            // `Basic` or `Bearer` is no secret; what follows is.
            hide = if matches!(lower.as_str(), "basic" | "bearer") { 2 } else { hide - 1 };
            out.push(if hide == 2 { word.to_owned() } else { "***".to_owned() });
            hide = hide.min(1);
            continue;
        }
        if lower.ends_with("authorization:") {
            hide = 1;
        }
        out.push(without_user(&without_key(word)));
    }
    out.join(" ")
}

/// A URL without its user: `https://user:pw@host/x` becomes `https://***@host/x`.
fn without_user(word: &str) -> String {
    let Some((scheme, rest)) = word.split_once("://") else { return word.to_owned() };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    match rest[..end].rfind('@') {
        Some(at) => format!("{scheme}://***{}", &rest[at..]),
        None => word.to_owned(),
    }
}

fn without_key(word: &str) -> String {
    let name = word.trim_matches(|c: char| !c.is_ascii_alphanumeric() && c != '/' && c != '.' && c != '_' && c != '-');
    let key = name.starts_with('/') && (name.ends_with("/key") || name.contains("/id_") || name.ends_with(".pem"));
    if key { word.replace(name, "***") } else { word.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_taken_out_of_messages() {
        let table = [
            ("fatal: unable to access 'https://u:pw@h/x/': 403", "fatal: unable to access 'https://***@h/x/': 403"),
            ("fatal: https://tok@h", "fatal: https://***@h"),
            ("> Authorization: Basic dTpw sent", "> Authorization: Basic *** sent"),
            ("authorization: dTpw", "authorization: ***"),
            ("Load key \"/tmp/ab/key\": invalid format", "Load key \"***\": invalid format"),
            ("no such identity: /root/.ssh/id_ed25519: gone", "no such identity: ***: gone"),
            ("fatal: repository 'https://h/a@b' not found", "fatal: repository 'https://h/a@b' not found"),
            ("", ""),
        ];
        for (text, expected) in table {
            assert_eq!(redacted(text), expected);
        }
    }
}
