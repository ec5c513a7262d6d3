//! Pattern lists: branches, tags, paths, repositories and other texts that a workflow selects (workflows-and-events R20,
//! R21, R25).
//!
//! One pattern is a glob, or a regular expression written `/…/` with optional flags `i s m x`. In a glob `*` and `?` stop at
//! `/`, `**` crosses it wherever it stands, `{a,b}` and `[a-z]` choose, `\` quotes. A glob matches the whole text, a regular
//! expression anywhere in it. A leading `!` excludes.
//!
//! One algorithm decides every list: an exclusion that hits says no; with exclusions only, everything else matches;
//! otherwise one inclusion must hit. The order of the patterns has no effect.
//!
//! The engine is the `regex` crate (linear time, no look-around, no back-references) with bounds on the source, the compiled
//! size and the nesting, because patterns come from repositories.

use regex::{Regex, RegexBuilder, bytes};

/// Longest pattern, in bytes.
pub const MAX_PATTERN_BYTES: usize = 512;
/// Most patterns in one list.
pub const MAX_PATTERNS: usize = 256;
const SIZE_LIMIT: usize = 1 << 20;
const NEST_LIMIT: u32 = 50;

/// A pattern that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pattern `{pattern}`: {problem}")]
pub struct PatternError {
    /// As written, cut to 80 characters.
    pub pattern: String,
    /// What is wrong with it, and what to do.
    pub problem: String,
}

impl PatternError {
    fn new(pattern: &str, problem: impl Into<String>) -> Self {
        Self { pattern: pattern.chars().take(80).collect(), problem: problem.into() }
    }
}

/// Compiles a regular expression within the bounds of R25. `flags` is a subset of `ismx`.
///
/// # Errors
/// [`PatternError`] for a bad flag, a source over [`MAX_PATTERN_BYTES`], a syntax error (look-around and back-references are
/// some) or an expression that compiles to more than 1 MiB.
pub fn bounded_regex(source: &str, flags: &str) -> Result<Regex, PatternError> {
    check_length(source)?;
    if let Some(flag) = flags.chars().find(|c| !"ismx".contains(*c)) {
        return Err(PatternError::new(source, format!("flag `{flag}` is not supported; use i, s, m or x")));
    }
    RegexBuilder::new(source)
        .case_insensitive(flags.contains('i'))
        .dot_matches_new_line(flags.contains('s'))
        .multi_line(flags.contains('m'))
        .ignore_whitespace(flags.contains('x'))
        .size_limit(SIZE_LIMIT)
        .nest_limit(NEST_LIMIT)
        .build()
        .map_err(|error| regex_error(source, &error))
}

fn check_length(source: &str) -> Result<(), PatternError> {
    if source.len() > MAX_PATTERN_BYTES {
        let problem = format!("it has {} bytes; at most {MAX_PATTERN_BYTES} are allowed", source.len());
        return Err(PatternError::new(source, problem));
    }
    Ok(())
}

fn regex_error(source: &str, error: &regex::Error) -> PatternError {
    let problem = match error {
        regex::Error::CompiledTooBig(_) => "it compiles to more than 1 MiB; make its repetitions smaller".to_owned(),
        // The last line of a syntax error is the reason; the lines before draw the pattern.
        other => {
            let text = other.to_string();
            let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("not a regular expression");
            last.trim().trim_start_matches("error: ").to_owned()
        }
    };
    PatternError::new(source, problem)
}

/// Compiles a regular expression that must match a label as a whole, without regard to case.
///
/// # Errors
/// As [`bounded_regex`].
pub(crate) fn anchored_label_regex(source: &str) -> Result<Regex, PatternError> {
    // By itself first: `a)|(b` must not become well-formed by the group around it.
    bounded_regex(source, "i")?;
    RegexBuilder::new(&format!(r"\A(?:{source})\z"))
        .case_insensitive(true)
        .size_limit(SIZE_LIMIT)
        .nest_limit(NEST_LIMIT + 1)
        .build()
        .map_err(|error| regex_error(source, &error))
}

/// Turns a glob over labels into the source of an anchored regular expression.
///
/// # Errors
/// [`PatternError`] when it is not a glob, or holds other characters than ASCII.
pub(crate) fn glob_to_label_regex(glob: &str) -> Result<String, PatternError> {
    if !glob.is_ascii() {
        return Err(PatternError::new(glob, "labels hold ASCII characters only"));
    }
    let whole = glob_source(glob)?;
    // Labels are ASCII, so Unicode mode changes nothing and the flag would keep the expression from compiling for text.
    let source = whole.strip_prefix("(?-u)").unwrap_or(&whole).to_owned();
    // Stars and question marks always compile, and to try would cost more than the rest of a file.
    if glob.contains(['[', '{']) {
        anchored_label_regex(&source)?;
    }
    Ok(source)
}

/// True when a text holds one of the characters that make a glob.
pub fn is_glob(text: &str) -> bool {
    text.contains(['*', '?', '[', ']', '{', '}'])
}

fn glob_source(glob: &str) -> Result<String, PatternError> {
    check_length(glob)?;
    let widened = widen_double_stars(glob);
    globset::GlobBuilder::new(&widened)
        .literal_separator(true)
        .backslash_escape(true)
        .empty_alternates(true)
        .build()
        .map(|built| built.regex().to_owned())
        .map_err(|error| PatternError::new(glob, error.kind().to_string()))
}

/// `**` beside other characters (`**.js`, `rel**`) means any text; globset knows `**` only as a whole path component.
fn widen_double_stars(glob: &str) -> String {
    let chars: Vec<char> = glob.chars().collect();
    let (mut out, mut at, mut in_class) = (String::with_capacity(glob.len()), 0, false);
    // Where the last whole component `**` ended in `out`; `**/**` is the same as `**`, which globset does not see.
    let mut doubled = None;
    while at < chars.len() {
        match chars[at] {
            '\\' if !in_class => {
                out.push('\\');
                out.extend(chars.get(at + 1));
                at += 2;
                continue;
            }
            '[' if !in_class => in_class = true,
            ']' if in_class => in_class = false,
            '*' if !in_class && chars.get(at + 1) == Some(&'*') => {
                let end = at + chars[at..].iter().take_while(|c| **c == '*').count();
                let opens = at == 0 || matches!(chars[at - 1], '/' | '{' | ',');
                let closes = chars.get(end).is_none_or(|c| matches!(c, '/' | '}' | ','));
                if opens && closes {
                    match doubled {
                        Some(len) if out.len() == len + 1 && out.ends_with('/') => out.truncate(len),
                        _ => out.push_str("**"),
                    }
                    doubled = Some(out.len());
                } else {
                    out.push_str("{*,*/**/*}");
                }
                at = end;
                continue;
            }
            _ => {}
        }
        out.push(chars[at]);
        at += 1;
    }
    out
}

#[derive(Clone, Debug)]
enum Body {
    Literal(String),
    Glob(bytes::Regex),
    Regex(Regex),
}

/// One pattern without its `!`.
#[derive(Clone, Debug)]
pub struct Pattern {
    text: String,
    body: Body,
}

impl Pattern {
    /// Compiles a glob or `/regex/flags`.
    ///
    /// # Errors
    /// [`PatternError`] naming the pattern and the problem.
    pub fn compile(text: &str) -> Result<Self, PatternError> {
        check_length(text)?;
        if text.is_empty() {
            return Err(PatternError::new(text, "it is empty; remove it or write `*`"));
        }
        let body = match split_regex(text) {
            Some((source, flags)) => {
                Body::Regex(bounded_regex(source, flags).map_err(|e| PatternError::new(text, e.problem))?)
            }
            None if is_glob(text) || text.contains('\\') => Body::Glob(
                bytes::RegexBuilder::new(&glob_source(text)?)
                    .dot_matches_new_line(true)
                    .size_limit(SIZE_LIMIT)
                    .nest_limit(NEST_LIMIT)
                    .build()
                    .map_err(|error| regex_error(text, &error))?,
            ),
            None => Body::Literal(text.to_owned()),
        };
        Ok(Self { text: text.to_owned(), body })
    }

    /// Whether [`Pattern::compile`] takes a text, without making what only matching needs.
    ///
    /// # Errors
    /// Those of [`Pattern::compile`].
    pub fn check(text: &str) -> Result<(), PatternError> {
        // A few stars and question marks make small automata that always compile.
        let plain = text.len() <= 64 && is_glob(text) && !text.contains(['[', '{']) && split_regex(text).is_none();
        if !plain {
            return Self::compile(text).map(drop);
        }
        check_length(text)?;
        glob_source(text).map(drop)
    }

    /// Whether the pattern hits `text`.
    pub fn is_match(&self, text: &str) -> bool {
        match &self.body {
            Body::Literal(literal) => literal == text,
            Body::Glob(regex) => regex.is_match(text.as_bytes()),
            Body::Regex(regex) => regex.is_match(text),
        }
    }

    /// As written, without `!`.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// `/source/flags` taken apart; none for any other text. The flags may be wrong: a misspelt flag is an error, not a glob.
pub(crate) fn split_regex(text: &str) -> Option<(&str, &str)> {
    let (source, flags) = text.strip_prefix('/')?.rsplit_once('/')?;
    let looks_like_flags = flags.len() <= 4 && flags.chars().all(|c| "gismxyu".contains(c));
    (!source.is_empty() && looks_like_flags).then_some((source, flags))
}

/// A list of patterns.
#[derive(Clone, Debug, Default)]
pub struct Patterns {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
}

impl Patterns {
    /// Compiles a list as written, `!x` excluding.
    ///
    /// # Errors
    /// [`PatternError`] for the first pattern that does not compile, or a list over [`MAX_PATTERNS`].
    pub fn compile<S: AsRef<str>>(list: &[S]) -> Result<Self, PatternError> {
        if list.len() > MAX_PATTERNS {
            let problem = format!("the list has {} patterns; at most {MAX_PATTERNS} are allowed", list.len());
            return Err(PatternError::new(list[MAX_PATTERNS].as_ref(), problem));
        }
        let mut out = Self::default();
        for text in list.iter().map(AsRef::as_ref) {
            match text.strip_prefix('!') {
                Some(rest) => out.exclude.push(Pattern::compile(rest)?),
                None => out.include.push(Pattern::compile(text)?),
            }
        }
        Ok(out)
    }

    /// True for an empty list, which does not filter: it matches everything, also what is absent.
    pub fn is_empty(&self) -> bool {
        self.include.is_empty() && self.exclude.is_empty()
    }

    /// R20: whether the list selects `text`.
    pub fn matches(&self, text: &str) -> bool {
        !self.exclude.iter().any(|p| p.is_match(text))
            && (self.include.is_empty() || self.include.iter().any(|p| p.is_match(text)))
    }

    /// R21: whether one of `paths` is selected. None of none.
    pub fn match_any<S: AsRef<str>>(&self, paths: &[S]) -> bool {
        paths.iter().any(|path| self.matches(path.as_ref()))
    }
}

/// W0503: the positions of inclusions that follow an exclusion. They do not bring back what the exclusion removes, though
/// other systems do so.
pub fn order_warnings<S: AsRef<str>>(list: &[S]) -> Vec<usize> {
    let first = list.iter().position(|text| text.as_ref().starts_with('!')).unwrap_or(list.len());
    (first..list.len()).filter(|at| !list[*at].as_ref().starts_with('!')).collect()
}

#[cfg(test)]
mod tests;
