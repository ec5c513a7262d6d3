//! Labels: canonical form, reserved names, the labels that the orchestrator derives, and the one rule that says whether an
//! agent may run a job.
//!
//! A [`CanonicalLabel`] is folded to lower case once, where text enters; a raw string cannot reach a comparison.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};

use crate::lock::{Matcher, Selector};
use crate::pattern::{PatternError, anchored_label_regex, glob_to_label_regex, is_glob};
use crate::state::words;

/// Prefix of the labels that only the system sets. Selectors may ask for them.
pub const RESERVED_PREFIX: &str = "kici:";
/// Longest label, in bytes.
pub const MAX_LABEL_BYTES: usize = 128;
/// Most matchers in one selector, `labels` and `exclude` together.
pub const MAX_MATCHERS: usize = 30;

/// A label in canonical form: trimmed, lower case, 1 to 128 of `[a-z0-9._:/@+-]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct CanonicalLabel(String);

/// Text that is not a label, or not one that may be set here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// Wrong characters or length.
    #[error("`{0}` is not a label; use 1 to 128 of letters, digits and `._:/@+-`")]
    Syntax(String),
    /// The reserved prefix where a person chooses labels.
    #[error("label `{0}` starts with `kici:`, which only the system sets; choose another prefix")]
    Reserved(String),
}

impl CanonicalLabel {
    /// Folds and checks a label.
    ///
    /// # Errors
    /// [`LabelError::Syntax`] for other characters or lengths than allowed.
    pub fn parse(text: &str) -> Result<Self, LabelError> {
        let folded = text.trim().to_ascii_lowercase();
        let legal = |b: u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b':' | b'/' | b'@' | b'+' | b'-');
        if (1..=MAX_LABEL_BYTES).contains(&folded.len()) && folded.bytes().all(legal) {
            Ok(Self(folded))
        } else {
            Err(LabelError::Syntax(text.chars().take(MAX_LABEL_BYTES).collect()))
        }
    }

    /// Like [`parse`](Self::parse), for a label that a person gives to an agent, token or pool.
    ///
    /// # Errors
    /// Also [`LabelError::Reserved`] for the prefix `kici:`.
    pub fn parse_user(text: &str) -> Result<Self, LabelError> {
        let label = Self::parse(text)?;
        if is_automatic(&label) { Err(LabelError::Reserved(label.0)) } else { Ok(label) }
    }

    /// The label as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CanonicalLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for CanonicalLabel {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        Self::parse(text)
    }
}

impl<'de> Deserialize<'de> for CanonicalLabel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// A set of labels, sorted.
pub type LabelSet = BTreeSet<CanonicalLabel>;

/// True for the labels that only the system sets (`kici:…`).
pub fn is_automatic(label: &CanonicalLabel) -> bool {
    label.0.starts_with(RESERVED_PREFIX)
}

/// Labels apart by who sets them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SplitLabels {
    /// Chosen by an operator.
    pub user: LabelSet,
    /// Set by the system.
    pub automatic: LabelSet,
}

/// Takes a set apart; the union of both parts is the set.
pub fn split(labels: &LabelSet) -> SplitLabels {
    let (automatic, user) = labels.iter().cloned().partition(is_automatic);
    SplitLabels { user, automatic }
}

words! {
    /// What kind of agent it is, label `kici:agent:<word>`.
    AgentType("agent type") {
        /// In a container.
        Container = "container",
        /// On a host, installed by an operator.
        BareMetal = "bare-metal",
        /// In a microVM.
        Firecracker = "firecracker",
        /// Started by an external provisioner.
        Event = "event",
        /// In a pod.
        Kubernetes = "kubernetes",
    }
}

/// The labels that follow from a platform, as Rust names it (`linux`, `macos`, `windows`; `x86_64`, `aarch64`).
pub fn platform_labels(os: &str, arch: &str) -> LabelSet {
    let (os, arch) = (os.to_ascii_lowercase(), arch.to_ascii_lowercase());
    let os: &[&str] = match os.as_str() {
        "macos" | "darwin" => &["macos", "darwin"],
        "windows" | "win32" => &["windows", "win32"],
        other => &[other],
    };
    let arch: &[&str] = match arch.as_str() {
        "x86_64" | "x64" | "amd64" => &["x64", "amd64"],
        "aarch64" | "arm64" => &["arm64"],
        other => &[other],
    };
    let os = os.iter().map(|name| format!("kici:os:{name}"));
    let arch = arch.iter().map(|name| format!("kici:arch:{name}"));
    os.chain(arch).filter_map(|text| CanonicalLabel::parse(&text).ok()).collect()
}

/// `kici:host:<hostname>`; none when the host name is no label.
pub fn host_label(hostname: &str) -> Option<CanonicalLabel> {
    (!hostname.trim().is_empty()).then(|| CanonicalLabel::parse(&format!("kici:host:{}", hostname.trim())).ok())?
}

/// `kici:agent:<type>`.
pub fn agent_type_label(kind: AgentType) -> CanonicalLabel {
    CanonicalLabel(format!("kici:agent:{kind}"))
}

/// True for the labels that an agent may report about itself beyond its token's scope.
pub fn is_self_reported(label: &CanonicalLabel) -> bool {
    ["kici:os:", "kici:arch:", "kici:host:"].iter().any(|prefix| label.0.starts_with(prefix))
}

/// One element of `runs_on` as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectorTerm {
    /// Written with a leading `!`.
    pub exclude: bool,
    /// What it asks for.
    pub matcher: Matcher,
}

/// Reads one element of `runs_on`: `!` excludes, `/…/` is a regular expression, `* ? [ ] { }` make a glob, the rest is one
/// label. A text with `${{` stays an exact label until the job is planned.
///
/// # Errors
/// [`SelectorError`] when it is none of these.
pub fn parse_term(text: &str) -> Result<SelectorTerm, SelectorError> {
    let (exclude, body) = match text.strip_prefix('!') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let matcher = if body.contains("${{") {
        Matcher::Exact { value: body.to_owned() }
    } else if body.len() > 2 && body.starts_with('/') && body.ends_with('/') {
        let source = body[1..body.len() - 1].to_owned();
        anchored_label_regex(&source)?;
        Matcher::Regex { source }
    } else if is_glob(body) {
        Matcher::Regex { source: glob_to_label_regex(&body.to_ascii_lowercase())? }
    } else {
        Matcher::Exact { value: CanonicalLabel::parse(body)?.0 }
    };
    Ok(SelectorTerm { exclude, matcher })
}

/// A selector that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// An exact matcher is not a label.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// A pattern does not compile.
    #[error(transparent)]
    Pattern(#[from] PatternError),
    /// No label is asked for: such a selector would match every agent.
    #[error("the selector asks for no label; name at least one, for example `default`")]
    Empty,
    /// More than [`MAX_MATCHERS`].
    #[error("the selector has {0} labels; at most {MAX_MATCHERS} are allowed")]
    TooMany(usize),
}

#[derive(Clone, Debug)]
pub(crate) enum Term {
    Exact(CanonicalLabel),
    Pattern { source: String, regex: regex::Regex },
}

impl Term {
    pub(crate) fn compile(matcher: &Matcher) -> Result<Self, SelectorError> {
        Ok(match matcher {
            Matcher::Exact { value } => Self::Exact(CanonicalLabel::parse(value)?),
            Matcher::Regex { source } => Self::Pattern { source: source.clone(), regex: anchored_label_regex(source)? },
        })
    }

    pub(crate) fn hit<'a>(&self, labels: &'a LabelSet) -> Option<&'a CanonicalLabel> {
        match self {
            Self::Exact(label) => labels.get(label),
            Self::Pattern { regex, .. } => labels.iter().find(|label| regex.is_match(label.as_str())),
        }
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(label) => write!(f, "`{label}`"),
            Self::Pattern { source, .. } => write!(f, "/{source}/"),
        }
    }
}

/// A [`Selector`] made ready for matching. Compile it once per distinct selector.
#[derive(Clone, Debug)]
pub struct CompiledSelector {
    labels: Vec<Term>,
    exclude: Vec<Term>,
}

impl CompiledSelector {
    /// Checks and compiles a rendered selector.
    ///
    /// # Errors
    /// [`SelectorError`]; a selector that asks for nothing is one, never "any agent".
    pub fn compile(selector: &Selector) -> Result<Self, SelectorError> {
        let count = selector.labels.len() + selector.exclude.len();
        if count > MAX_MATCHERS {
            return Err(SelectorError::TooMany(count));
        }
        if selector.labels.is_empty() {
            return Err(SelectorError::Empty);
        }
        Ok(Self {
            labels: selector.labels.iter().map(Term::compile).collect::<Result<_, _>>()?,
            exclude: selector.exclude.iter().map(Term::compile).collect::<Result<_, _>>()?,
        })
    }

    /// The labels that are asked for by name.
    pub fn exact_labels(&self) -> impl Iterator<Item = &CanonicalLabel> {
        self.labels.iter().filter_map(|term| match term {
            Term::Exact(label) => Some(label),
            Term::Pattern { .. } => None,
        })
    }
}

/// What the match rule looks at in an agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentFacts {
    /// All its labels, the automatic ones included.
    pub labels: LabelSet,
    /// Taints: it takes only jobs that ask for each of these by name.
    pub mandatory: LabelSet,
    /// Hash of the machine's identity, if it told one.
    pub machine_id: Option<String>,
}

/// The first thing that keeps an agent from running a job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// It lacks a label, or no label hits a pattern.
    #[error("it has no label {0}")]
    Missing(String),
    /// It has a label that the job excludes.
    #[error("its label `{label}` is excluded by {by}")]
    Excluded {
        /// The label.
        label: String,
        /// The matcher.
        by: String,
    },
    /// The job does not ask for one of its mandatory labels.
    #[error("it only takes jobs that ask for `{0}` by name")]
    Taint(String),
    /// The repository lies on the orchestrator's disk and the agent runs elsewhere.
    #[error("the repository is a directory on the orchestrator's machine and this agent runs on another one")]
    OtherMachine,
}

/// The match rule (dispatch 2.6): every label asked for is there, every pattern hits, nothing excluded hits, every mandatory
/// label of the agent is asked for by name, and the machine is the required one.
///
/// # Errors
/// The first predicate that fails, in that order.
pub fn eligible(
    selector: &CompiledSelector,
    requires_machine_id: Option<&str>,
    agent: &AgentFacts,
) -> Result<(), Mismatch> {
    if let Some(term) = selector.labels.iter().find(|term| term.hit(&agent.labels).is_none()) {
        return Err(Mismatch::Missing(term.to_string()));
    }
    for term in &selector.exclude {
        if let Some(label) = term.hit(&agent.labels) {
            return Err(Mismatch::Excluded { label: label.to_string(), by: term.to_string() });
        }
    }
    if let Some(taint) = agent.mandatory.iter().find(|taint| !selector.exact_labels().any(|label| label == *taint)) {
        return Err(Mismatch::Taint(taint.to_string()));
    }
    match requires_machine_id {
        Some(machine) if agent.machine_id.as_deref() != Some(machine) => Err(Mismatch::OtherMachine),
        _ => Ok(()),
    }
}

/// Why none of `agents` may run the job, in one sentence for people; none when one may.
pub fn explain_unroutable(
    selector: &CompiledSelector,
    requires_machine_id: Option<&str>,
    agents: &[AgentFacts],
) -> Option<String> {
    if agents.is_empty() {
        return Some(format!("no agent is registered; the job asks for {}", listed(&selector.labels)));
    }
    let reasons: Vec<Mismatch> =
        agents.iter().map(|agent| eligible(selector, requires_machine_id, agent).err()).collect::<Option<_>>()?;
    let nowhere: Vec<_> =
        selector.labels.iter().filter(|t| agents.iter().all(|a| t.hit(&a.labels).is_none())).collect();
    if !nowhere.is_empty() {
        let offered: LabelSet = agents.iter().flat_map(|agent| agent.labels.iter().cloned()).collect();
        return Some(format!("no agent offers label {}; agents offer: {}", listed(nowhere), sample(&offered)));
    }
    let mut distinct: Vec<String> = Vec::new();
    for reason in reasons.iter().map(ToString::to_string) {
        if !distinct.contains(&reason) && distinct.len() < 5 {
            distinct.push(reason);
        }
    }
    Some(format!("no agent fits {}: {}", listed(&selector.labels), distinct.join("; ")))
}

fn listed<'a>(terms: impl IntoIterator<Item = &'a Term>) -> String {
    terms.into_iter().map(Term::to_string).collect::<Vec<_>>().join(", ")
}

/// The first labels of a set, the operators' own first, and how many are not shown.
fn sample(labels: &LabelSet) -> String {
    const SHOWN: usize = 20;
    let SplitLabels { user, automatic } = split(labels);
    let mut text = user.iter().chain(&automatic).take(SHOWN).map(CanonicalLabel::as_str).collect::<Vec<_>>().join(", ");
    if labels.len() > SHOWN {
        text.push_str(&format!(" and {} more", labels.len() - SHOWN));
    }
    text
}

#[cfg(test)]
mod tests;
