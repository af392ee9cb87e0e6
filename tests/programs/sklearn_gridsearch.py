"""A pipeline for texts and its grid search, as in scikit-learn's "Working With Text Data"."""

from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import Pipeline

from cerebro.sklearn import SearchCV  # Cerebro: from sklearn.model_selection import GridSearchCV

# Which data set does a line of its description describe?
sets = [load_breast_cancer(), load_diabetes(), load_iris(), load_wine()]
lines = [(line, label) for label, data in enumerate(sets) for line in data.DESCR.splitlines()]
texts, target = zip(*[(line, label) for line, label in lines if len(line) > 20], strict=True)

text_clf = Pipeline(
    [
        ("vect", CountVectorizer()),
        ("tfidf", TfidfTransformer()),
        ("clf", MultinomialNB()),
    ]
)

parameters = {
    "vect__ngram_range": [(1, 1), (1, 2)],
    "tfidf__use_idf": (True, False),
    "clf__alpha": (1e-1, 1e-2),
}
gs_clf = SearchCV(text_clf, parameters, cv=5, epochs=1)  # Cerebro: GridSearchCV(..., n_jobs=-1)
gs_clf = gs_clf.fit(texts, target)

print(sets[gs_clf.predict(["sepal length"])[0]].filename)
print(gs_clf.best_score_)
for param_name in sorted(parameters.keys()):
    print(f"{param_name}: {gs_clf.best_params_[param_name]!r}")
print(gs_clf.cv_results_["mean_test_score"], gs_clf.cv_results_["rank_test_score"])
