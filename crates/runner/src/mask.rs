//! Masking of secret values in output.
//!
//! Values are only ever added (a set rebuilt from new values would forget old ones). Each is looked for in the forms in which
//! it usually leaks: as it is, base64 at the three alignments and in lines, URL-encoded, JSON-escaped, and all of that line by line.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError, RwLock};

use aho_corasick::{AhoCorasick, MatchKind};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use serde_json::Value as Json;

/// Shorter values are not masked: they would hit everywhere.
pub const MIN_VALUE_LEN: usize = 3;
/// Shorter lines of a value are not looked for in their encoded forms.
const MIN_LINE_LEN: usize = 8;
/// Characters of a line of base64: as base64(1) and as RFC 7468 break it.
const LINE_WIDTHS: [usize; 2] = [76, 64];
/// Of longer forms only this many leading bytes are looked for, which bounds what a long line must hold back.
const MAX_FORM_LEN: usize = 16 * 1024;
/// What stands in the place of a value.
pub const MASK: &[u8] = b"***";

/// The values that must not be shown; shared by everything that writes output of one job.
#[derive(Default)]
pub struct Masker {
    inner: RwLock<Inner>,
}

#[derive(Default)]
struct Inner {
    forms: BTreeSet<Vec<u8>>,
    mask: Mask,
}

impl std::fmt::Debug for Masker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Masker(..)")
    }
}

impl Masker {
    /// A set with these values.
    pub fn new<'a>(values: impl IntoIterator<Item = &'a str>) -> Self {
        let masker = Self::default();
        masker.add(values);
        masker
    }

    /// Adds values; those below [`MIN_VALUE_LEN`] bytes are left out. Output that is written after this returns is masked.
    pub fn add<'a>(&self, values: impl IntoIterator<Item = &'a str>) {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let before = inner.forms.len();
        for value in values {
            forms(value, &mut inner.forms);
        }
        if inner.forms.len() != before {
            inner.mask = Mask::of(&inner.forms);
        }
    }

    /// The set as it is now.
    pub fn current(&self) -> Mask {
        self.inner.read().unwrap_or_else(PoisonError::into_inner).mask.clone()
    }

    /// A document with every text in it masked, keys excepted.
    pub fn mask_json(&self, json: Json) -> Json {
        match json {
            Json::String(text) => Json::String(self.mask_text(&text)),
            Json::Array(items) => Json::Array(items.into_iter().map(|item| self.mask_json(item)).collect()),
            Json::Object(fields) => {
                Json::Object(fields.into_iter().map(|(name, field)| (name, self.mask_json(field))).collect())
            }
            plain => plain,
        }
    }

    /// `text` with all values masked.
    pub fn mask_text(&self, text: &str) -> String {
        let mut out = Vec::with_capacity(text.len());
        self.current().mask(text.as_bytes(), &mut out);
        String::from_utf8_lossy(&out).into_owned()
    }
}

/// A fixed set of values to mask.
#[derive(Clone, Default)]
pub struct Mask {
    automaton: Option<Arc<AhoCorasick>>,
    longest: usize,
}

impl Mask {
    fn of(forms: &BTreeSet<Vec<u8>>) -> Self {
        // Overlapping search needs the standard kind. A build can only fail on a set of gigabytes, which frames do not carry.
        let automaton = AhoCorasick::builder().match_kind(MatchKind::Standard).build(forms).ok();
        Self { automaton: automaton.map(Arc::new), longest: forms.iter().map(Vec::len).max().unwrap_or(0) }
    }

    /// Appends `text` to `out`, masked.
    pub fn mask(&self, text: &[u8], out: &mut Vec<u8>) {
        self.copy(text, &self.spans(text), text.len(), out);
    }

    /// Appends as much of `text` as can be masked without knowing what follows it, and returns how many bytes that was.
    pub fn mask_prefix(&self, text: &[u8], out: &mut Vec<u8>) -> usize {
        let spans = self.spans(text);
        let mut cut = text.len().saturating_sub(self.longest.saturating_sub(1));
        if let Some(span) = spans.iter().find(|span| span.0 < cut && cut < span.1) {
            cut = span.0;
        }
        while cut > 0 && text.get(cut).is_some_and(|b| b & 0xC0 == 0x80) && !spans.iter().any(|s| s.1 == cut) {
            cut -= 1;
        }
        self.copy(text, &spans, cut, out);
        cut
    }

    /// Byte ranges that values cover, overlaps joined, in order.
    fn spans(&self, text: &[u8]) -> Vec<(usize, usize)> {
        let Some(automaton) = &self.automaton else { return Vec::new() };
        let mut found: Vec<(usize, usize)> =
            automaton.find_overlapping_iter(text).map(|m| (m.start(), m.end())).collect();
        found.sort_unstable();
        let mut joined: Vec<(usize, usize)> = Vec::with_capacity(found.len());
        for (start, end) in found {
            match joined.last_mut() {
                Some(last) if start < last.1 => last.1 = last.1.max(end),
                _ => joined.push((start, end)),
            }
        }
        joined
    }

    fn copy(&self, text: &[u8], spans: &[(usize, usize)], end: usize, out: &mut Vec<u8>) {
        let mut at = 0;
        for (start, stop) in spans.iter().take_while(|span| span.0 < end) {
            out.extend_from_slice(&text[at..*start]);
            out.extend_from_slice(MASK);
            at = *stop;
        }
        out.extend_from_slice(&text[at.min(end)..end]);
    }
}

fn forms(value: &str, into: &mut BTreeSet<Vec<u8>>) {
    let mut add = |form: Vec<u8>| {
        let mut form = form;
        form.truncate(MAX_FORM_LEN);
        if form.len() >= MIN_VALUE_LEN {
            into.insert(form);
        }
    };
    if value.trim().len() < MIN_VALUE_LEN {
        return;
    }
    for line in value.lines().map(str::trim) {
        add(line.as_bytes().to_vec());
        // Shorter lines would hit everywhere in encoded text.
        if line.len() >= MIN_LINE_LEN {
            encoded(line, &mut add);
        }
    }
    encoded(value, &mut add);
}

/// The encoded forms of a text.
fn encoded(text: &str, add: &mut impl FnMut(Vec<u8>)) {
    let json = serde_json::Value::from(text).to_string();
    add(json.as_bytes()[1..json.len() - 1].to_vec());
    add(url_encoded(text, b"-._~"));
    add(url_encoded(text, b"-._~/"));
    for alignment in 0..3 {
        let mut padded = vec![0; alignment];
        padded.extend_from_slice(text.as_bytes());
        // Characters at both ends that also depend on the neighbours are left out.
        let first = [0, 2, 3][alignment];
        let sure = padded.len() * 8 / 6;
        for encoded in [STANDARD_NO_PAD.encode(&padded), URL_SAFE_NO_PAD.encode(&padded)] {
            add(encoded.as_bytes().get(first..sure).unwrap_or_default().to_vec());
        }
    }
    // `base64` and PEM break what they write into lines.
    let whole = STANDARD_NO_PAD.encode(text);
    let sure = &whole.as_bytes()[..text.len() * 8 / 6];
    for width in LINE_WIDTHS.into_iter().filter(|width| sure.len() > *width) {
        sure.chunks(width).filter(|piece| piece.len() >= MIN_LINE_LEN).for_each(|piece| add(piece.to_vec()));
    }
}

/// Percent-encoding of RFC 3986 with upper-case hex; `plain` besides letters and digits stays.
fn url_encoded(value: &str, plain: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || plain.contains(&byte) {
            out.push(byte);
        } else {
            out.extend_from_slice(format!("%{byte:02X}").as_bytes());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_usual_form_is_masked() {
        let secret = "p@ss/w\"ord+42";
        let masker = Masker::new([secret]);
        let cases = [
            format!("raw {secret} end"),
            format!("b64 {}", base64::engine::general_purpose::STANDARD.encode(secret)),
            format!("b64 {}", base64::engine::general_purpose::STANDARD.encode(format!("a{secret}z"))),
            format!("b64 {}", base64::engine::general_purpose::STANDARD.encode(format!("ab{secret}zz"))),
            "url p%40ss%2Fw%22ord%2B42".to_owned(),
            "url p%40ss/w%22ord%2B42".to_owned(),
            format!("json {}", serde_json::json!({ "k": secret })),
        ];
        for case in cases {
            assert!(masker.mask_text(&case).contains("***"), "{case}");
        }
    }

    #[test]
    fn values_are_added_and_never_forgotten() {
        let masker = Masker::new(["first-secret"]);
        masker.add(["second-secret", "ab"]);
        assert_eq!(masker.mask_text("first-secret second-secret ab"), "*** *** ab");
    }

    #[test]
    fn each_line_of_a_value_and_overlaps_are_masked() {
        let masker = Masker::new(["-----BEGIN\nabcdefgh\n-----END", "efghij"]);
        assert_eq!(masker.mask_text("x abcdefgh y"), "x *** y");
        assert_eq!(masker.mask_text("abcdefghij"), "***");
    }
}
