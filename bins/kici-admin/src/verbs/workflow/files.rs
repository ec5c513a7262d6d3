//! The workflow files of a repository on this machine.

use std::fs;
use std::path::{Path, PathBuf};

use kici_engine::compile::{CompiledSet, compile_set};
use kici_engine::diagnostic::render_long;

use crate::exit::{Failure, VERDICT};
use crate::output::Output;

/// Where a repository keeps its workflows.
pub(super) const FOLDER: &str = ".kici/workflows";
/// Where it keeps the steps that they use, beside that folder.
const STEPS: &str = "steps";

/// What cannot be read.
pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::usage(format!("{}: {error}", path.display()))
}

/// Path and text of the files that `path` stands for, by name.
pub(super) fn read(path: &Path) -> Result<Vec<(String, String)>, Failure> {
    let meta = fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    let mut paths = Vec::new();
    if meta.is_dir() {
        let inner = path.join(FOLDER);
        let folder = if inner.is_dir() { inner } else { path.to_owned() };
        paths = yaml_files(&folder)?;
        if paths.is_empty() {
            let text = format!("{} holds no .yaml or .yml file; workflows live in {FOLDER}", folder.display());
            return Err(Failure::usage(text));
        }
    } else {
        paths.push(path.to_owned());
    }
    let folder = paths.first().and_then(|file| file.parent()).filter(|folder| folder.ends_with(FOLDER));
    if let Some(steps) = folder.and_then(Path::parent).map(|kici| kici.join(STEPS)).filter(|steps| steps.is_dir()) {
        paths.extend(yaml_files(&steps)?);
    }
    let read = |file: &PathBuf| {
        let bytes = fs::read(file).map_err(|error| unreadable(file, &error))?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let sound = error.utf8_error().valid_up_to();
            let line = 1 + error.as_bytes()[..sound].iter().filter(|byte| **byte == b'\n').count();
            Failure::new(VERDICT, format!("{}:{line}: not UTF-8; save the file as UTF-8", file.display()))
        })?;
        Ok((file.display().to_string(), text))
    };
    paths.iter().map(read).collect()
}

/// The files of a folder that count, by name.
fn yaml_files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| unreadable(folder, &error))? {
        let file = entry.map_err(|error| unreadable(folder, &error))?.path();
        if file.is_file() && is_workflow(&file) {
            paths.push(file);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The rule of the orchestrator: YAML, and no leading underscore.
fn is_workflow(file: &Path) -> bool {
    let yaml = file.extension().is_some_and(|end| end == "yaml" || end == "yml");
    yaml && !file.file_name().is_some_and(|name| name.to_string_lossy().starts_with('_'))
}

/// The compiled files of a repository, named from its root as an orchestrator names them. What is wrong with a file goes to
/// stderr.
pub(super) fn compile(out: &Output, repo: &Path) -> Result<CompiledSet, Failure> {
    let folder = repo.join(FOLDER);
    if !folder.is_dir() {
        return Err(Failure::usage(format!("{} does not exist; --repo names a repository", folder.display())));
    }
    let mut files = read(&folder)?;
    for (path, _) in &mut files {
        let file = Path::new(path.as_str());
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_step = file.parent().is_some_and(|folder| folder.ends_with(STEPS));
        *path = if is_step { format!(".kici/{STEPS}/{name}") } else { format!("{FOLDER}/{name}") };
    }
    let set = compile_set(&files);
    for (path, compiled) in &set.files {
        let source = source_of(&files, path);
        for diagnostic in &compiled.diagnostics {
            out.say(render_long(diagnostic, source, false).trim_end());
        }
    }
    Ok(set)
}

/// The text of a file.
pub(super) fn source_of<'a>(files: &'a [(String, String)], path: &str) -> &'a str {
    files.iter().find(|(file, _)| file == path).map_or("", |(_, source)| source.as_str())
}

/// The failure of a command that needs every file.
pub(super) fn all_valid(set: &CompiledSet) -> Result<(), Failure> {
    let bad: Vec<&str> =
        set.files.iter().filter(|(_, file)| file.has_errors()).map(|(path, _)| path.as_str()).collect();
    if bad.is_empty() { Ok(()) } else { Err(Failure::new(VERDICT, format!("invalid: {}", bad.join(", ")))) }
}
