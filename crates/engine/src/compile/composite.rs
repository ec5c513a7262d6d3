//! Step files: steps that several jobs use, in `.kici/steps/` of the same commit.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use crate::diagnostic::Diagnostic;
use crate::lock::{Composite, Group, Input, Step, Value};
use crate::yaml::{self, Data, Entry, Lines, Node};

use super::job::{Defaults, Place};
use super::keys;
use super::known::Known;
use super::memo::Memo;
use super::scope::{self, JobNames};
use super::step::{Around, Steps};
use super::walk::{Fields, Walk};

/// Folder of step files.
pub const STEP_DIR: &str = ".kici/steps/";
/// Deepest nesting of step files.
const MAX_DEPTH: usize = 3;
/// Most uses of step files in one job.
const MAX_USES: usize = 64;

/// A step file, compiled.
#[derive(Debug)]
pub(super) struct Part {
    inputs: BTreeMap<String, Input>,
    outputs: BTreeMap<String, Value>,
    steps: Vec<Step>,
    groups: Vec<Group>,
    composites: Vec<Composite>,
    depth: usize,
    /// The step files it uses.
    uses: BTreeSet<String>,
}

/// The step files of a commit. Each is compiled when it is first used.
#[derive(Debug, Default)]
pub(super) struct Library {
    /// By path in the repository: the path as it was given, and the text.
    sources: BTreeMap<String, (String, String)>,
    state: RefCell<HashMap<String, State>>,
    found: RefCell<BTreeMap<String, Vec<Diagnostic>>>,
    /// What all files of the set share.
    pub(super) memo: Memo,
}

#[derive(Clone, Debug)]
enum State {
    /// Being compiled: who needs it now is part of itself.
    Open,
    Faulty,
    Done(Rc<Part>),
}

impl Library {
    pub(super) fn new<'f>(files: impl IntoIterator<Item = &'f (String, String)>) -> Self {
        let part = |file: &'f (String, String)| Some((part_path(&file.0)?.to_owned(), file.clone()));
        Self { sources: files.into_iter().filter_map(part).collect(), ..Self::default() }
    }

    /// Compiles what nothing has used, and gives out what is wrong, by file.
    pub(super) fn finish(self) -> BTreeMap<String, Vec<Diagnostic>> {
        for path in self.sources.keys() {
            self.part(path);
        }
        self.found.into_inner()
    }

    /// All step files by path, with LF line ends.
    pub(super) fn files(&self) -> BTreeMap<String, String> {
        let unix = |source: &String| source.replace("\r\n", "\n");
        self.sources.iter().map(|(path, (_, source))| (path.clone(), unix(source))).collect()
    }

    /// The text of a step file.
    pub(super) fn source(&self, path: &str) -> Option<&str> {
        self.sources.get(path).map(|(_, source)| source.as_str())
    }

    fn part(&self, path: &str) -> Option<State> {
        let (file, source) = self.sources.get(path)?;
        if let Some(known) = self.state.borrow().get(path) {
            return Some(known.clone());
        }
        self.state.borrow_mut().insert(path.to_owned(), State::Open);
        let lines = Lines::new(source);
        let mut walk = Walk::new(file, &lines, self);
        let reading = yaml::read(source, yaml::Limits::default());
        let mut faulty = !reading.faults.is_empty();
        walk.yaml_faults(reading.faults);
        let part = match reading.documents.as_slice() {
            [document] => {
                faulty |= document.faulty;
                walk.step_file(&document.root, path)
            }
            documents => {
                let place = documents.get(1).map_or(yaml::Span::on_line(1, 1, 1), |document| document.root.span);
                if !faulty {
                    walk.fault("K0101", place, "a step file is one document").expected(["a map with `steps`"]);
                }
                None
            }
        };
        faulty |= walk.errors > 0;
        let (diagnostics, _) = walk.finish();
        self.found.borrow_mut().insert(file.clone(), diagnostics);
        let state = part.filter(|_| !faulty).map_or(State::Faulty, |part| State::Done(Rc::new(part)));
        self.state.borrow_mut().insert(path.to_owned(), state.clone());
        Some(state)
    }
}

impl Walk<'_> {
    /// A step file.
    fn step_file(&mut self, root: &Node, path: &str) -> Option<Part> {
        let fields = self.fields(root, &keys::PART, "the step file")?;
        let inputs = match fields.get("inputs") {
            Some(entry) => self.within("inputs", |walk| walk.declared(&entry.value)),
            None => BTreeMap::new(),
        };
        self.description(fields);
        let defaults = Defaults::default();
        let input_names = inputs.keys().cloned().collect();
        let names = JobNames { matrix: Some(Vec::new()), ..JobNames::default() };
        let known = Known::default();
        let place = Place { defaults: &defaults, inputs: &input_names, known: &known, member: false };
        let around = Around { place: &place, names: &names, job: path };
        let Some(entry) = fields.get("steps") else {
            self.fault("K0101", root.span, "the step file has no `steps`").expected(["`steps`, a list of steps"]);
            return None;
        };
        let Steps { steps, groups, composites, ids } = self.within("steps", |walk| walk.steps(&entry.value, &around));
        let scope = scope::step("outputs", &input_names, &names, &ids);
        let outputs = self.outputs_in(fields, &scope);
        let depth = 1 + self.deepest;
        Some(Part { inputs, outputs, steps, groups, composites, depth, uses: self.used.clone() })
    }

    /// A step with `use`: the steps of the file go into the list, with what they stand in.
    pub(super) fn use_step(&mut self, node: &Node, index: &mut usize, done: &mut Steps, around: &Around<'_>) {
        let owner = around.step_owner(*index);
        *index += 1;
        let Some(fields) = self.fields(node, &keys::STEP, &owner) else { return };
        if let Data::Map(entries) = &node.data {
            let alien = |entry: &&Entry| !keys::OF_USE.contains(&entry.key.as_str()) && keys::STEP.knows(&entry.key);
            for entry in entries.iter().filter(alien) {
                self.within(&entry.key, |walk| {
                    walk.fault("K0104", entry.span, format!("`{}` beside `use` in {owner} has no effect", entry.key))
                        .help("put it on the steps of the file");
                });
            }
        }
        let before = done.ids.clone();
        let Some(entry) = fields.get("use") else { return };
        let part = self.within("use", |walk| walk.find_part(&entry.value));
        let with = self.with(fields, part.as_deref(), &owner, &before, around);
        let mut used = Composite {
            parent: None,
            id: fields.get("id").and_then(|entry| self.within("id", |walk| walk.step_id(&entry.value))),
            name: fields
                .get("name")
                .and_then(|entry| self.within("name", |walk| walk.fixed(&entry.value, "a name").map(str::to_owned))),
            source: self.source(node),
            path: String::new(),
            condition: fields.get("if").and_then(|entry| {
                let scope = around.scope("if", &before);
                self.within("if", |walk| walk.condition(&entry.value, &scope))
            }),
            inputs: BTreeMap::new(),
            with,
            env: fields.get("env").map_or_else(BTreeMap::new, |entry| {
                let scope = around.scope("env", &before);
                self.within("env", |walk| walk.env(&entry.value, &scope, true))
            }),
            outputs: BTreeMap::new(),
        };
        let Some(part) = part else { return };
        used.path = entry.value.text().map(normal).unwrap_or_default();
        (used.inputs, used.outputs) = (part.inputs.clone(), part.outputs.clone());
        if self.bounded(done.composites.len() + 1 + part.composites.len(), MAX_USES, "uses of step files", node.span) {
            done.append(used, &part);
        }
    }

    fn find_part(&mut self, node: &Node) -> Option<Rc<Part>> {
        let text = self.fixed(node, "the path of a step file")?;
        let path = normal(text);
        let library = self.library;
        if !text.starts_with("./") || !path.starts_with(STEP_DIR) || path[STEP_DIR.len()..].contains('/') {
            self.fault("K0305", node.span, format!("`{}` is not the path of a step file", yaml::shorten(text)))
                .expected(["a path such as ./.kici/steps/name.yaml"])
                .help("step files lie in .kici/steps of the same commit; actions of other systems cannot be used");
            return None;
        }
        match library.part(&path) {
            None => {
                let known: Vec<String> = library.sources.keys().map(|path| format!("./{path}")).collect();
                let suggestion = keys::nearest(text, known.iter().map(String::as_str)).map(str::to_owned);
                self.fault("K0305", node.span, format!("there is no step file `{}`", yaml::shorten(text)))
                    .expected(known.iter().take(16).cloned())
                    .replace(suggestion);
                None
            }
            Some(State::Open) => {
                self.fault("K0302", node.span, format!("step file `{text}` uses itself"));
                None
            }
            Some(State::Faulty) => {
                self.fault("K0305", node.span, format!("step file `{text}` has errors"));
                None
            }
            Some(State::Done(part)) if part.depth + usize::from(self.is_part()) > MAX_DEPTH => {
                let message = format!("step files are nested deeper than {MAX_DEPTH} levels");
                self.fault("K0704", node.span, message);
                None
            }
            Some(State::Done(part)) => {
                self.deepest = self.deepest.max(part.depth);
                self.used.insert(path);
                self.used.extend(part.uses.iter().cloned());
                Some(part)
            }
        }
    }

    fn with(
        &mut self,
        fields: Fields<'_>,
        part: Option<&Part>,
        owner: &str,
        before: &[String],
        around: &Around<'_>,
    ) -> BTreeMap<String, Value> {
        let mut with = BTreeMap::new();
        let scope = around.scope("with", before);
        let entry = fields.get("with");
        if let Some(entry) = entry {
            self.within("with", |walk| {
                for entry in walk.map(&entry.value).unwrap_or_default() {
                    let value = walk.within(&entry.key, |walk| {
                        if let Some(part) = part.filter(|part| !part.inputs.contains_key(&entry.key)) {
                            let names = part.inputs.keys().map(String::as_str);
                            let suggestion = keys::nearest(&entry.key, names.clone()).map(str::to_owned);
                            let message = format!("the step file has no input `{}`", yaml::shorten(&entry.key));
                            walk.fault("K0505", entry.span, message).expected(names).replace(suggestion);
                        }
                        walk.agent_template(&entry.value, &scope)
                    });
                    with.extend(value.map(|value| (entry.key.clone(), value)));
                }
            });
        }
        let Some(part) = part else { return with };
        let given = |name: &str| match entry.map(|entry| &entry.value.data) {
            Some(Data::Map(entries)) => entries.iter().any(|entry| entry.key == name),
            _ => false,
        };
        let missing =
            part.inputs.iter().find(|(name, input)| input.required && input.default.is_none() && !given(name));
        if let (Some((name, _)), Some(place)) = (missing, fields.get("use")) {
            self.fault("K0505", place.span, format!("{owner} does not give input `{name}` of its step file"))
                .help(format!("add `with: {{ {name}: … }}`"));
        }
        self.check_fixed(entry, part, &with);
        with
    }

    /// Inputs without expressions are judged now, as far as they can be.
    fn check_fixed(&mut self, entry: Option<&Entry>, part: &Part, with: &BTreeMap<String, Value>) {
        let Some(Data::Map(entries)) = entry.map(|entry| &entry.value.data) else { return };
        for entry in entries {
            let (Some(input), Some(Value::Static { r#static: text })) =
                (part.inputs.get(&entry.key), with.get(&entry.key))
            else {
                continue;
            };
            let declared = BTreeMap::from([(entry.key.clone(), input.clone())]);
            let given = BTreeMap::from([(entry.key.clone(), text.as_str().into())]);
            for error in crate::inputs::validate(&declared, &given).err().unwrap_or_default() {
                self.within("with", |walk| {
                    walk.fault("K0505", entry.value.span, error.to_string());
                });
            }
        }
    }

    fn is_part(&self) -> bool {
        part_path(self.file).is_some()
    }
}

impl Steps {
    /// Adds the steps of a file; what they point to moves to the end of the job's lists.
    fn append(&mut self, used: Composite, part: &Part) {
        let number = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        let (groups, own) = (number(self.groups.len()), number(self.composites.len()));
        self.groups.extend(part.groups.iter().cloned());
        let inner = own + 1;
        self.composites.push(used);
        self.composites.extend(
            part.composites.iter().map(|used| Composite {
                parent: Some(used.parent.map_or(own, |parent| parent + inner)),
                ..used.clone()
            }),
        );
        self.steps.extend(part.steps.iter().map(|step| {
            let composite = Some(step.composite.map_or(own, |used| used + inner));
            let hooks = |list: &[Step]| list.iter().map(|hook| Step { composite, ..hook.clone() }).collect();
            Step {
                group: step.group.map(|group| group + groups),
                composite,
                on_cancel: hooks(&step.on_cancel),
                cleanup: hooks(&step.cleanup),
                ..step.clone()
            }
        }));
    }
}

/// The path in the repository of a step file, which may be given with what stands before.
pub(super) fn part_path(path: &str) -> Option<&str> {
    let at = path.find(STEP_DIR)?;
    (at == 0 || path[..at].ends_with('/')).then_some(&path[at..])
}

/// `./a/b` as `a/b`.
fn normal(path: &str) -> String {
    path.strip_prefix("./").unwrap_or(path).to_owned()
}
